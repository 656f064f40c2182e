"""Loading an engine from an artifact on disk, inside the engine process.

``EngineOptions`` size the runtime. The KV pool is allocated once, here. A first request warms the model up, so that
the first request of a client does not pay for lazy initialization of libraries.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.graph.kv_layout import KVLayout, kv_layout, layout_of, one_group
from optkit.graph.states import KVSpec, StateSpec, recurrent_of, sequence_bytes
from optkit.lowering.native_model import NativeModel
from optkit.machine.heap import trim_heap
from optkit.machine.present import present_target
from optkit.recipe.engine_options import MAX_REQUESTS, NO_SPECULATION, EngineOptions, engine_options
from optkit.runtime.baked import adopt_baked
from optkit.runtime.engine import Engine, RequestFailed
from optkit.runtime.kv.offload import HostBlockStore, open_store
from optkit.runtime.kv.windows import most_tokens
from optkit.runtime.ranks.size import for_each_rank, num_ranks
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import Lengths, NgramProposer, Speculator
from optkit.runtime.sampling.recycling import Recycled
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.saving import is_plain, read_saved, save_model
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.specprefill.load import check_choices, scoring_queue
from optkit.runtime.structured.compiler import Grammars, vocabulary
from optkit.runtime.types import EngineRefusal, SamplingParams

if TYPE_CHECKING:
    from optkit.graph.variants import SharedWeights
    from optkit.lowering.lower import Executable
    from optkit.machine.target import Target
    from optkit.runtime.cuda.device import Device
    from optkit.runtime.embedding import Embedder
    from optkit.runtime.ranks.start import RankZero
    from optkit.runtime.sampling.draft_model import DraftModel

logger = logging.getLogger(__name__)

Model: TypeAlias = "Executable | NativeModel"

Guesser = Speculator | TreeSpeculator
TREES = "trees"  # the form of a graph that takes trees of guesses
WARM_UP_TOKENS = (33, 1)  # one prefill and the decode after it
SLOT_SHARE, CHECKPOINT_SHARE = 2, 4  # of a model with KV: half of kv_cache_bytes, and a quarter
LEAST_CHECKPOINTS = 4  # states kept by default
MOST_FREE_BLOCKS = 1 << 20  # of a model without KV
PREFILL_TARGET_TOKENS = 256  # on a CPU, where matrix products reach full speed at 128 to 256 rows


class HasStates(Protocol):
    """The facts that decide on the memory of a model's states: of a lowered model, or of graph.json."""

    @property
    def states(self) -> Sequence[StateSpec]: ...

    @property
    def kv_specs(self) -> Sequence[KVSpec]: ...

    @property
    def max_model_len(self) -> int: ...


def open_engine(artifact_dir: str, **given: Any) -> Engine:
    """The engine of an artifact, for programs with the engine in their own process.

    Args:
        given: options by name. Other options come from the recipe, else from the defaults.

    Raises:
        UserError: as ``load_engine``, or an unknown option, or a value out of bounds.
    """
    recipe = Artifact.open(artifact_dir, verify=False).recipe
    return load_engine(artifact_dir, engine_options(recipe, given))


def load_engine(artifact_dir: str, options: EngineOptions) -> Engine:
    """The engine of an artifact.

    Hashes of the artifact's files are not checked: the API process has checked them just before.

    Raises:
        UserError: the artifact can't be loaded or fails on a first request, or the options contradict each other.
    """
    os.environ.setdefault("ONEDNN_CACHE_CONTEXT_UNSAFE", "1")  # weights never move: skip primitive rebuilds
    check_choices(options)
    artifact = Artifact.open(artifact_dir, verify=False)
    zero = None
    if (size := num_ranks(artifact, options)) > 1:
        from optkit.runtime.ranks.start import start

        options = for_each_rank(options, size)
        zero = start(artifact, options, size)
    loaded = Loaded(zero.model) if zero else load_model(artifact, options)
    model = loaded.model
    gpu = device_of(model)
    if gpu is None:
        warn_about_kernels(artifact.directory)
    cost = CostModel()
    guesses = speculator(artifact, model, cost, options, branches=loaded.takes_trees)
    takes_the_rest = gpu is not None and options.kv_cache_bytes is None
    if gpu is not None:  # after the draft model, whose memory is not free
        options = with_kv_bytes(model, options, gpu, guesses)
    config, store = scheduler_config(model, options, artifact.recipe.target), None
    if reason := kv_layout(model.states).reason:
        logger.info("layers with a window keep the KV of all tokens: %s", reason)
    if options.kv_offload_dir is not None and not options.kv_offload_bytes:
        raise UserError(
            "a directory for offloaded KV needs a size", where="kv_offload_dir", fix="give --kv-offload-bytes"
        )
    if options.kv_offload_bytes:
        config, store = offloading(config, model, options.kv_offload_bytes, options.kv_offload_dir)
    target = None if gpu is None else present_target(artifact.recipe.target)
    engine = make_engine(model, config, gpu, store, guesses, cost, target, zero)
    tokenizer = artifact.directory / "tokenizer.json"
    engine.grammars = Grammars(partial(vocabulary, tokenizer, model.vocab_size))
    engine.from_saved_weights = loaded.is_saved
    if takes_the_rest:
        engine.memory_share = options.gpu_memory_utilization
    engine.specprefill = scoring_queue(artifact, loaded.shared, options, engine.config)
    if loaded.shared is not None:
        engine.make_embedder = lambda: embedder(artifact, loaded, engine.config)
    warm_up(engine, artifact_dir)
    if isinstance(engine.runner, ModelRunner) and zero is None:
        adopt_baked(engine, artifact, engine.runner)
    if loaded.to_save is not None and loaded.shared is not None:
        shared, form = loaded.shared(), form_of(options)
        save_model(artifact, loaded.to_save, shared, form, takes_trees=loaded.takes_trees)
    trim_heap()
    return engine


@dataclass(frozen=True)
class Loaded:
    """The model of an artifact.

    Attributes:
        shared: gives the packed weights for further graphs of the artifact; None where there are none.
        hidden: the saved model without the output head.
        takes_trees: the model takes trees of guesses.
        is_saved: read from the file of an earlier start.
        to_save: the lowered form of ``model``, for later starts; None where nothing is saved.
    """

    model: Model
    shared: Callable[[], SharedWeights] | None = None
    hidden: NativeModel | None = None
    takes_trees: bool = False
    is_saved: bool = False
    to_save: Executable | None = None


def load_model(artifact: Artifact, options: EngineOptions) -> Loaded:
    """The model of ``artifact``: the saved one of an earlier start, which needs no torch, or lowered now.

    A lowered model of native calls alone runs like a saved model.
    """
    plain = may_be_saved(artifact, options)
    if plain and (saved := read_saved(artifact, form_of(options))):
        return Loaded(saved.model, cache(new_weights), saved.hidden, saved.takes_trees, is_saved=True)
    from optkit.lowering.to_native import to_native
    from optkit.runtime.tree_graph import TreeGraph

    shared = new_weights() if artifact.recipe.target == "cpu" else None
    trees = TreeGraph(present_target(artifact.recipe.target)) if form_of(options) == TREES else None
    lowered = artifact.executable(trust_code=options.trust_artifact_code, shared=shared, change=trees)
    return Loaded(
        to_native(lowered) or lowered,
        (lambda: shared) if shared is not None else None,
        takes_trees=trees is not None and not trees.reason,
        to_save=lowered if plain else None,
    )


def may_be_saved(artifact: Artifact, options: EngineOptions) -> bool:
    """True where the engine runs by kernels of optkit alone, with no further graph than ``form_of`` says."""
    return options.saved_start and not options.specprefill and is_plain(artifact)


def form_of(options: EngineOptions) -> str:
    """The name of the change of the artifact's graph; empty for none."""
    return TREES if options.speculative_model == "suffix" else ""


def new_weights() -> SharedWeights:
    """No packed weights yet."""
    from optkit.graph.variants import SharedWeights

    return SharedWeights()


def embedder(artifact: Artifact, loaded: Loaded, config: SchedulerConfig) -> Embedder:
    """The embedder of an artifact for a CPU.

    Raises:
        UserError: the graph has no output head, or the artifact is not that of the packed weights any more.
    """
    from optkit.runtime.embedding import Embedder

    sizes = config.block_size, config.max_num_batched_tokens
    if loaded.hidden is not None:
        return Embedder(loaded.hidden, *sizes)
    from optkit.runtime.hidden_graph import hidden_graph

    try:
        artifact.check_present()
    except UserError as error:
        raise UserError(error.what, where="embeddings", fix="start the engine again") from error
    shared = loaded.shared() if loaded.shared else None
    return Embedder(artifact.executable(shared=shared, change=hidden_graph), *sizes)


def device_of(model: Model) -> Device | None:
    """The GPU of ``model``, or None."""
    if getattr(model.device, "type", model.device) != "cuda":
        return None
    from optkit.runtime.cuda.device import CudaDevice

    return CudaDevice()


def warn_about_kernels(directory: Path) -> None:
    """Log a warning where the native kernels are missing, or are others than on the machine of ``optkit optimize``."""
    from optkit.artifact.measured_on import notice
    from optkit.kernels.cpu.native import missing_warning

    for warning in filter(None, (missing_warning(), notice(directory))):
        logger.warning(warning)


def with_kv_bytes(
    model: Model, options: EngineOptions, gpu: Device, guesses: Guesser | None = None
) -> EngineOptions:
    """``options`` with the bytes of the KV cache: on a GPU the memory left by weights and the largest step.

    ``guesses``: the source of proposals, with weights and KV pool on the GPU already.
    """
    from optkit.runtime.cuda.start import kv_cache_bytes

    if options.kv_cache_bytes is not None:
        return options
    layout, state = kv_layout(model.states), sequence_bytes(model.states)
    blocks = (model.max_model_len // options.block_size + 2) * len(layout.groups)
    enough = layout.num_bytes(blocks, options.block_size)
    if state:  # enough for every share
        states = options.max_num_seqs + (options.state_checkpoints or LEAST_CHECKPOINTS)
        enough = CHECKPOINT_SHARE * (enough + states * state)
    limits = scheduler_config(model, msgspec.structs.replace(options, kv_cache_bytes=enough))
    draft_step = gpu.peak_bytes(lambda: guesses.run_largest(limits.max_num_seqs)) if guesses else 0
    left = kv_cache_bytes(model, limits, gpu, options.gpu_memory_utilization, draft_step)
    asked = limits.num_checkpoints if limits.num_state_slots else options.state_checkpoints
    kept = (limits.num_state_slots + limits.num_checkpoints) * state
    return msgspec.structs.replace(options, kv_cache_bytes=left + kept, state_checkpoints=asked)


def make_engine(
    model: Model,
    config: SchedulerConfig,
    gpu: Device | None,
    store: HostBlockStore | None,
    guesses: Guesser | None,
    cost: CostModel,
    target: Target | None = None,
    zero: RankZero | None = None,
) -> Engine:
    """The engine for the device of ``model``: ``gpu``, or the CPU where ``gpu`` is None; with ``zero`` of several
    ranks.
    """
    if zero is not None:
        from optkit.runtime.ranks.start import ranked_engine

        layout = layout_of(model.states, config.kv_windows)
        return ranked_engine(zero, config, layout, store, guesses, cost)
    if gpu is None:
        slots = config.num_state_slots + config.num_checkpoints
        layout = layout_of(model.states, config.kv_windows)
        runner = ModelRunner(model, config.num_blocks, config.block_size, num_slots=slots, layout=layout)
        return Engine(runner, config, store, guesses, cost=cost)
    from optkit.runtime.cuda.sampling import sampler
    from optkit.runtime.cuda.start import gpu_engine

    return gpu_engine(model, config, gpu, store=store, proposer=guesses, cost=cost, sample=sampler(target))


def scheduler_config(
    model: Model, options: EngineOptions, target: str = "", layout: KVLayout | None = None
) -> SchedulerConfig:
    """The scheduler's limits: from the model and from ``options``.

    Args:
        target: of the recipe; on "cpu" a step takes no further prompt once matrix products run at full speed.
        layout: the groups of layers with block tables of their own, by default those of ``kv_layout``.

    Raises:
        UserError: the KV cache holds too little, or ``options`` ask for more than the model has.
    """
    if not model.states:
        raise UserError(
            "no layer keeps a state between tokens, so there is nothing to serve", where="graph.json"
        )
    layout = layout or kv_layout(model.states)
    slots, checkpoints = num_states(model, options)
    if slots < options.max_num_seqs:
        logger.warning(
            "%d of %d requests (max_num_seqs) run at once: %d recurrent states of %d bytes fit their share of "
            "kv_cache_bytes",
            *(slots, options.max_num_seqs, slots, sequence_bytes(model.states)),
        )
    blocks = num_blocks(model, options, slots, checkpoints, layout)
    room = most_tokens(layout.windows, blocks, options.max_num_batched_tokens, options.block_size)
    asked = options.max_model_len or model.max_model_len
    if asked > model.max_model_len:
        raise UserError(
            f"the model's context is {model.max_model_len} tokens, {asked} were asked for",
            where="max_model_len",
        )
    try:
        return SchedulerConfig(
            **options.scheduling() | {"max_num_seqs": slots},
            max_model_len=min(asked, room),
            num_blocks=blocks,
            prefill_target_tokens=PREFILL_TARGET_TOKENS if target == "cpu" else 0,
            num_state_slots=slots if recurrent_of(model.states) else 0,
            num_checkpoints=checkpoints,
            variant_limits=model.variant_limits,
            kv_windows=layout.windows,
            keeps_all=getattr(model, "keeps_all", ""),
        )
    except ValueError as error:
        raise UserError(str(error), where="options of the runtime", fix="optkit serve --help") from error


def num_states(model: HasStates, options: EngineOptions) -> tuple[int, int]:
    """Requests that run at once, and checkpoints for the prefix cache, with room in ``kv_cache_bytes`` for the states.

    Of a model with KV the requests get half of the bytes, and the checkpoints what was asked for or a quarter. Without
    KV the requests come first, and the checkpoints get the rest. A model without recurrent states runs all requests.
    """
    size, total = sequence_bytes(model.states), options.kv_cache_bytes or 0
    if not size:
        return options.max_num_seqs, 0
    asked = options.state_checkpoints if options.enable_prefix_caching else 0
    least = LEAST_CHECKPOINTS if asked is None else asked
    share = total // SLOT_SHARE if model.kv_specs else total - least * size
    slots = min(options.max_num_seqs, max(1, share // size))
    rest = total // CHECKPOINT_SHARE if model.kv_specs else total - slots * size
    return slots, min(MAX_REQUESTS, max(least, rest // size)) if asked is None else asked


def num_blocks(
    model: HasStates, options: EngineOptions, slots: int, checkpoints: int, layout: KVLayout
) -> int:
    """Blocks of the KV pool. Without KV blocks cost nothing; there are enough for all requests and checkpoints.

    Raises:
        UserError: the recurrent states leave room for fewer than two for each group.
    """
    size, states = options.kv_cache_bytes or 0, (slots + checkpoints) * sequence_bytes(model.states)
    least = 2 * len(layout.groups) if model.kv_specs else 0
    need = states + layout.num_bytes(least, options.block_size)
    if size < need:
        held = [f"{slots} recurrent states", f"{checkpoints} checkpoints"] if states else []
        held += [f"{'two' if least == 2 else least} blocks"] if model.kv_specs else []
        raise UserError(
            f"{size:,} bytes of KV cache do not hold {' and '.join(held)} ({need:,} bytes)",
            where="kv_cache_bytes",
            fix=f"raise --kv-cache-bytes{' or lower --state-checkpoints' * bool(states)}",
        )
    if model.kv_specs:
        return layout.blocks_in(size - states, options.block_size)
    longest = -(-model.max_model_len // options.block_size)
    return max(longest + 1, min((slots + checkpoints) * longest, MOST_FREE_BLOCKS))


def offloading(
    config: SchedulerConfig, model: Model, num_bytes: int, directory: str | None
) -> tuple[SchedulerConfig, HostBlockStore]:
    """``config`` with host blocks for evicted KV, and the store."""
    if not config.enable_prefix_caching:
        raise UserError(
            "offloading needs the prefix cache, which is off",
            where="kv_offload_bytes",
            fix="leave out --kv-offload-bytes, or --no-enable-prefix-caching",
        )
    if config.num_state_slots:
        raise UserError(
            "the store keeps KV alone, and KV without the recurrent state of the model can't be used",
            where="kv_offload_bytes",
            fix="leave out --kv-offload-bytes; --state-checkpoints keeps more states in memory",
        )
    size = kv_layout(model.states).block_bytes(config.block_size)
    num_host_blocks, store = open_store(num_bytes, size, Path(directory) if directory else None)
    return msgspec.structs.replace(config, num_host_blocks=num_host_blocks), store


def speculator(
    artifact: Artifact, model: Model, cost: CostModel, options: EngineOptions, *, branches: bool = False
) -> Guesser | None:
    """The source of guesses in ``speculative_model``: ``ngram``, ``suffix`` or another artifact; None without one.

    ``branches``: the model takes trees of guesses.
    """
    method = options.speculative_model
    if method in (None, NO_SPECULATION):
        return None
    refuse_recurrent(model, "wrong guesses can't be taken out of the model's recurrent state again")
    if method == "suffix":
        cached = options.speculative_cached_requests
        recycled = Recycled() if device_of(model) is None else None
        return TreeSpeculator(
            cost,
            options.num_speculative_tokens,
            branches=branches,
            recycled=recycled,
            max_cached_requests=cached,
        )
    lengths = Lengths(cost, options.num_speculative_tokens)
    source = NgramProposer() if method == "ngram" else draft_model(artifact, method, model.vocab_size)
    return Speculator(source, lengths)


def refuse_recurrent(model: Model, reason: str) -> None:
    """Refuse speculation with a model with recurrent states.

    Raises:
        UserError: ``model`` has such a state.
    """
    if recurrent_of(model.states):
        raise UserError(
            reason, where="speculative_model", fix="leave out --speculative-model, or use another"
        )


def draft_model(artifact: Artifact, directory: str, vocab_size: int) -> DraftModel:
    """The draft model of another artifact with the same tokenizer. The draft's recipe sizes the draft model.

    Args:
        vocab_size: of the target model. Padding may make the two vocabularies differ in size.

    Raises:
        UserError: another tokenizer, or an artifact that cannot be loaded.
    """
    draft = Artifact.open(directory)
    if tokenizer_of(artifact) != tokenizer_of(draft):
        raise UserError(
            "the draft model has another tokenizer",
            where=directory,
            fix="use ngram or another artifact",
        )
    from optkit.runtime.sampling.draft_model import DraftModel

    model = draft.executable()
    refuse_recurrent(model, "a draft model must not have a recurrent state, which can't take back guesses")
    options = engine_options(draft.recipe)
    if options.kv_cache_bytes is None:
        options = msgspec.structs.replace(options, kv_cache_bytes=draft.recipe.runtime.kv_cache_bytes)
    config = scheduler_config(model, options, draft.recipe.target, one_group(model.states))
    if model.vocab_size != vocab_size:
        logger.info(
            "the draft model has %d token ids, the model %d: guesses are among the ids of both",
            model.vocab_size,
            vocab_size,
        )
    runner = ModelRunner(model, config.num_blocks, config.block_size)
    return DraftModel(runner, config.max_model_len, config.max_num_batched_tokens, vocab_size)


def tokenizer_of(artifact: Artifact) -> bytes:
    """The bytes of the artifact's ``tokenizer.json``.

    Raises:
        UserError: there is no such file.
    """
    file = artifact.directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            "there is no tokenizer.json, so the ids of model and draft model can't be compared",
            where=str(artifact.directory),
            fix="use --speculative-model ngram",
        )
    return file.read_bytes()


def warm_up(engine: Engine, artifact_dir: str) -> None:
    """Run a prefill and a few decodes, to initialize lazy libraries before the first request.

    Raises:
        UserError: the model fails on the request.
    """
    length = min(WARM_UP_TOKENS[0], engine.config.max_model_len - 4)
    try:
        engine.generate([[1] * max(length, 1)], SamplingParams(max_tokens=3, temperature=0.0))
    except (RequestFailed, EngineRefusal) as error:
        fix = "optkit verify checks the files; make the artifact again; do not serve this one"
        raise UserError(f"a first request failed ({error})", where=artifact_dir, fix=fix) from error
    engine.reset_prefix_cache()
    engine.scheduler.kv.reset_counters()

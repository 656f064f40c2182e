"""From an artifact on disk to an engine that serves it.

Runs inside the engine process. The recipe sizes the runtime; options of ``optkit serve`` override it. The KV pool
is allocated here, once, from the recipe's byte budget, and the model is warmed up so that the first request
does not pay for first-use costs of the libraries below.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.lowering.lower import Executable
from optkit.machine.present import present_target
from optkit.recipe.schema import Recipe
from optkit.runtime.engine import Engine, RequestFailed
from optkit.runtime.kv.offload import SlotStore, open_store
from optkit.runtime.kv.pools import block_bytes, blocks_for_bytes
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.draft_model import DraftModel
from optkit.runtime.sampling.proposer import Lengths, NgramProposer, Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import EngineRefusal, SamplingParams

if TYPE_CHECKING:
    from optkit.machine.target import Target
    from optkit.runtime.cuda.device import Device

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (33, 1)  # one prefill and the decode after it
PREFILL_TARGET_TOKENS = 256  # on a CPU, where matrix products reach full speed at 128 to 256 rows
NUM_SPECULATIVE_TOKENS = 8


def load_engine(artifact_dir: str, options: Mapping[str, Any]) -> Engine:
    """The engine of an artifact.

    ``options``: those of ``optkit serve`` that concern the engine, under their names; None and a missing one leave the
    recipe, then the default, its say. Sizes are bytes, SLOs milliseconds.
    The API process verified the artifact's hashes just before; they are not computed twice.

    Raises:
        UserError: the artifact can't be loaded or fails on a first request, or the options ask for what cannot be.
    """
    os.environ.setdefault("ONEDNN_CACHE_CONTEXT_UNSAFE", "1")  # weights never move: skip primitive rebuilds
    given = {k: v for k, v in options.items() if v is not None}
    artifact = Artifact.open(artifact_dir, verify=False)
    model = artifact.executable(trust_code=bool(given.get("trust_artifact_code")))
    gpu = device_of(model)
    if model.device.type == "cpu":
        warn_without_native_kernels()
    cost = CostModel()
    guesses = speculator(artifact, model, cost, given)
    if gpu is not None:  # after the draft model, whose memory is not free
        given = with_kv_bytes(model, artifact.recipe, given, gpu, guesses)
    config, store = scheduler_config(model, artifact.recipe, given), None
    if "kv_offload_dir" in given and "kv_offload_bytes" not in given:
        raise UserError(
            "it says where, and not how much", where="kv_offload_dir", fix="give --kv-offload-bytes"
        )
    if "kv_offload_bytes" in given:
        config, store = offloading(config, model, given)
    engine = make_engine(model, config, gpu, store, guesses, cost, present_target(artifact.recipe.target))
    if gpu is not None and options.get("kv_cache_bytes") is None:
        engine.memory_share = memory_share(artifact.recipe, given)
    warm_up(engine, artifact_dir)
    trim_heap()
    return engine


def device_of(model: Executable) -> Device | None:
    """The GPU that ``model`` is on, or None."""
    if model.device.type != "cuda":
        return None
    from optkit.runtime.cuda.device import CudaDevice

    return CudaDevice()


def warn_without_native_kernels() -> None:
    """Log why this CPU's steps will be slow, where the native kernels are missing."""
    from optkit.kernels.cpu.native import missing_warning

    warning = missing_warning()
    if warning:
        logger.warning(warning)


def with_kv_bytes(
    model: Executable,
    recipe: Recipe,
    options: Mapping[str, Any],
    gpu: Device,
    guesses: Speculator | None = None,
) -> dict[str, Any]:
    """``options`` with the bytes of the KV cache, which on a GPU is what other things leave.

    ``guesses``: what proposes tokens; its weights and its KV pool are on the GPU already.
    """
    from optkit.runtime.cuda.start import kv_cache_bytes

    if "kv_cache_bytes" in options:
        return dict(options)
    block = block_bytes(model.kv_specs, recipe.runtime.block_size)
    enough = (model.max_model_len // recipe.runtime.block_size + 2) * block
    limits = scheduler_config(model, recipe, {**options, "kv_cache_bytes": enough})
    share = memory_share(recipe, options)
    draft_step = gpu.peak_bytes(lambda: guesses.run_largest(limits.max_num_seqs)) if guesses else 0
    return {**options, "kv_cache_bytes": kv_cache_bytes(model, limits, gpu, share, draft_step)}


def memory_share(recipe: Recipe, options: Mapping[str, Any]) -> float:
    """The part of a GPU's memory that the engine may use."""
    return options.get("gpu_memory_utilization", recipe.runtime.gpu_memory_utilization)


def make_engine(
    model: Executable,
    config: SchedulerConfig,
    gpu: Device | None,
    store: SlotStore | None,
    guesses: Speculator | None,
    cost: CostModel,
    target: Target | None = None,
) -> Engine:
    """The engine for where the model is."""
    if gpu is None:
        runner = ModelRunner(model, config.num_blocks, config.block_size)
        return Engine(runner, config, store, guesses, cost=cost)
    from optkit.runtime.cuda.sampling import sampler
    from optkit.runtime.cuda.start import gpu_engine

    return gpu_engine(model, config, gpu, store=store, proposer=guesses, cost=cost, sample=sampler(target))


def scheduler_config(model: Executable, recipe: Recipe, options: Mapping[str, Any]) -> SchedulerConfig:
    """Limits of the runtime: the model's, the recipe's, and the command line's, in that order of strength."""
    runtime = recipe.runtime
    if not model.kv_specs:
        raise UserError("the model has no attention layer, so there is nothing to serve", where="graph.json")
    kv_bytes = int(options.get("kv_cache_bytes", runtime.kv_cache_bytes))
    blocks = blocks_for_bytes(model.kv_specs, runtime.block_size, kv_bytes)
    if blocks < 2:
        need = 2 * block_bytes(model.kv_specs, runtime.block_size)
        raise UserError(
            f"{kv_bytes:,} bytes of KV cache do not hold two blocks ({need:,} bytes)",
            where="kv_cache_bytes",
            fix="raise --kv-cache-bytes",
        )
    asked = options.get("max_model_len", runtime.max_model_len) or model.max_model_len
    if asked > model.max_model_len:
        raise UserError(
            f"the model's context is {model.max_model_len} tokens, {asked} were asked for",
            where="max_model_len",
        )
    try:
        return SchedulerConfig(
            max_num_seqs=int(options.get("max_num_seqs", runtime.max_num_seqs)),
            max_num_batched_tokens=int(options.get("max_num_batched_tokens", runtime.max_num_batched_tokens)),
            max_model_len=min(int(asked), blocks * runtime.block_size),
            block_size=runtime.block_size,
            num_blocks=blocks,
            policy=options.get("scheduling_policy", "fcfs"),
            ttft_slo=seconds(options.get("ttft_slo_ms", recipe.slo.ttft_ms)),
            tpot_slo=seconds(options.get("tpot_slo_ms", recipe.slo.tpot_ms)),
            enforce_ttft_slo=options.get("enforce_ttft_slo", False),
            queue_timeout=options.get("queue_timeout"),
            prefill_target_tokens=PREFILL_TARGET_TOKENS if recipe.target == "cpu" else 0,
            enable_prefix_caching=options.get("enable_prefix_caching", True),
            form_limits=model.form_limits,
        )
    except ValueError as error:
        raise UserError(str(error), where="options of the runtime", fix="optkit serve --help") from error


def offloading(
    config: SchedulerConfig, model: Executable, options: Mapping[str, Any]
) -> tuple[SchedulerConfig, SlotStore]:
    """``config`` with slots for evicted KV, and where they are."""
    if not config.enable_prefix_caching:
        raise UserError(
            "it keeps what the prefix cache evicts, and that is off",
            where="kv_offload_bytes",
            fix="leave out --kv-offload-bytes, or --no-enable-prefix-caching",
        )
    directory = options.get("kv_offload_dir")
    slot = block_bytes(model.kv_specs, config.block_size)
    num_slots, store = open_store(options["kv_offload_bytes"], slot, Path(directory) if directory else None)
    return replace(config, num_offload_slots=num_slots), store


def speculator(
    artifact: Artifact, model: Executable, cost: CostModel, options: Mapping[str, Any]
) -> Speculator | None:
    """Guesses as ``speculative_model`` says, ``ngram`` or another artifact; or none."""
    method = options.get("speculative_model")
    if method is None:
        return None
    lengths = Lengths(cost, options.get("num_speculative_tokens", NUM_SPECULATIVE_TOKENS))
    source = NgramProposer() if method == "ngram" else draft_model(artifact, method, model.vocab_size)
    return Speculator(source, lengths)


def draft_model(artifact: Artifact, directory: str, vocab_size: int) -> DraftModel:
    """The model of another artifact, which must have the same tokenizer. Its own recipe sizes it.

    ``vocab_size`` is that of the model it guesses for. The two may differ, as padding does.

    Raises:
        UserError: it has another tokenizer, or can't be loaded.
    """
    draft = Artifact.open(directory)
    if tokenizer_of(artifact) != tokenizer_of(draft):
        raise UserError(
            "it has another tokenizer", where=directory, fix="say ngram, or name another artifact"
        )
    model = draft.executable()
    config = scheduler_config(model, draft.recipe, {})
    if model.vocab_size != vocab_size:
        logger.info(
            "the draft model has %d token ids, the model %d: guesses are among the ids of both",
            model.vocab_size,
            vocab_size,
        )
    runner = ModelRunner(model, config.num_blocks, config.block_size)
    return DraftModel(runner, config.max_model_len, config.max_num_batched_tokens, vocab_size)


def tokenizer_of(artifact: Artifact) -> bytes:
    """The bytes of its ``tokenizer.json``.

    Raises:
        UserError: it has none.
    """
    file = artifact.directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            "it has no tokenizer.json, so a draft model's ids can't be compared with the model's",
            where=str(artifact.directory),
            fix="say --speculative-model ngram",
        )
    return file.read_bytes()


def seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def trim_heap() -> None:
    """What packing the weights needed goes back to the system; glibc would keep it."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def warm_up(engine: Engine, artifact_dir: str) -> None:
    """Run a prefill and a few decodes, so that lazily initialized libraries are ready before the first request.

    Raises:
        UserError: the model fails on it, so it would on others.
    """
    length = min(WARM_UP_TOKENS[0], engine.config.max_model_len - 4)
    try:
        engine.generate([[1] * max(length, 1)], SamplingParams(max_tokens=3, temperature=0.0))
    except (RequestFailed, EngineRefusal) as error:
        fix = "optkit verify checks the files; make the artifact again; do not serve this one"
        raise UserError(f"a first request failed ({error})", where=artifact_dir, fix=fix) from error
    engine.reset_prefix_cache()
    engine.scheduler.kv.reset_counters()

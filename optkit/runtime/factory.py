"""Loading an engine from an artifact on disk, inside the engine process.

``EngineOptions`` size the runtime. The KV pool is allocated once, here. A first request warms the model up, so that
the first request of a client does not pay for lazy initialization of libraries.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.graph.kv_layout import kv_layout, layout_of
from optkit.machine.heap import trim_heap
from optkit.machine.present import present_target
from optkit.recipe.engine_options import EngineOptions, engine_options
from optkit.runtime.baked import adopt_baked
from optkit.runtime.engine import Engine, RequestFailed
from optkit.runtime.kv.offload import HostBlockStore
from optkit.runtime.loaded import Loaded, Model, device_of, embedder, form_of, load_model
from optkit.runtime.ranks.size import for_each_rank, sharing
from optkit.runtime.runner import ModelRunner
from optkit.runtime.saving import save_model
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.sizing import offloading, scheduler_config, with_kv_bytes
from optkit.runtime.specprefill.load import check_choices, scoring_queue
from optkit.runtime.speculation import Guesser, speculator
from optkit.runtime.structured.compiler import Grammars, vocabulary
from optkit.runtime.types import EngineRefusal, SamplingParams

if TYPE_CHECKING:
    from optkit.machine.target import Target
    from optkit.runtime.cuda.device import Device
    from optkit.runtime.ranks.start import RankZero

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (33, 1)  # one prefill and the decode after it


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
    if (ranks := sharing(artifact, options)).size > 1:
        from optkit.runtime.ranks.start import start

        options = for_each_rank(options, ranks)
        zero = start(artifact, options, ranks)
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
    layout = (zero.whole if zero else None) or kv_layout(model.states)
    config, store = scheduler_config(model, options, artifact.recipe.target, layout), None
    if layout.reason:
        logger.info("layers with a window keep the KV of all tokens: %s", layout.reason)
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


def warn_about_kernels(directory: Path) -> None:
    """Log a warning where the native kernels are missing, or are others than on the machine of ``optkit optimize``."""
    from optkit.artifact.measured_on import notice
    from optkit.kernels.cpu.native import missing_warning

    for warning in filter(None, (missing_warning(), notice(directory))):
        logger.warning(warning)


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

"""From an artifact on disk to an engine that serves it.

Runs inside the engine process. The recipe sizes the runtime; options of ``optkit serve`` override it. The KV pool
is allocated here, once, from the recipe's byte budget, and the model is warmed up so that the first request
does not pay for first-use costs of the libraries below.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping
from typing import Any

from optkit.artifact import Artifact
from optkit.errors import UserError
from optkit.graph.lower import Executable
from optkit.recipe import Recipe
from optkit.runtime.engine import Engine
from optkit.runtime.kv_cache import block_bytes, blocks_for_bytes
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams

WARM_UP_TOKENS = (33, 1)  # one prefill and the decode after it


def load_engine(artifact_dir: str, options: Mapping[str, Any]) -> Engine:
    """The engine of an artifact.

    ``options`` may hold ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``, ``kv_cache_bytes`` and
    ``trust_artifact_code``.
    The API process verified the artifact's hashes just before; they are not computed twice.

    Raises:
        UserError: the artifact can't be loaded, or the KV budget holds not even one sequence.
    """
    os.environ.setdefault("ONEDNN_CACHE_CONTEXT_UNSAFE", "1")  # weights never move: skip primitive rebuilds
    artifact = Artifact.open(artifact_dir, verify=False)
    model = artifact.executable(trust_code=bool(options.get("trust_artifact_code")))
    config = scheduler_config(model, artifact.recipe, {k: v for k, v in options.items() if v is not None})
    engine = Engine(ModelRunner(model, config.num_blocks, config.block_size), config)
    warm_up(engine)
    trim_heap()
    return engine


def scheduler_config(model: Executable, recipe: Recipe, options: Mapping[str, Any]) -> SchedulerConfig:
    """Limits of the runtime: the model's, the recipe's, and the command line's, in that order of strength."""
    runtime = recipe.runtime
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
    return SchedulerConfig(
        max_num_seqs=int(options.get("max_num_seqs", runtime.max_num_seqs)),
        max_num_batched_tokens=int(options.get("max_num_batched_tokens", runtime.max_num_batched_tokens)),
        max_model_len=min(int(asked), blocks * runtime.block_size),
        block_size=runtime.block_size,
        num_blocks=blocks,
    )


def trim_heap() -> None:
    """What packing the weights needed goes back to the system; glibc would keep it."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def warm_up(engine: Engine) -> None:
    """Run a prefill and a few decodes, so that lazily initialized libraries are ready before the first request."""
    length = min(WARM_UP_TOKENS[0], engine.config.max_model_len - 4)
    engine.generate([[1] * max(length, 1)], SamplingParams(max_tokens=3, temperature=0.0))

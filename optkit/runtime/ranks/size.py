"""The number of processes of an engine, and the options of each."""

from __future__ import annotations

import msgspec

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.machine.target import usable_cores
from optkit.parallel.sizes import TENSOR_PARALLEL, check_size
from optkit.recipe.engine_options import EngineOptions, flag

OPTION = "tensor_parallel_size"


def num_ranks(artifact: Artifact, options: EngineOptions) -> int:
    """The number of processes: the option's, else the artifact's, else 1. Reads no weight.

    Raises:
        UserError: the model has no so many shares, or the options need a single process.
    """
    asked = options.tensor_parallel_size
    size = asked or noted(artifact)
    if size == 1:
        return 1
    where = flag(OPTION) if asked else str(artifact.directory)
    check_size(artifact.meta(), size, where)
    fix = f"{flag(OPTION)} 1"
    if artifact.recipe.target != "cpu":
        raise UserError("ranks are served on CPUs alone", where=where, fix=fix)
    if options.kv_offload_bytes:
        raise UserError(
            "ranks do not offload KV", where=flag("kv_offload_bytes"), fix=f"leave it out, or {fix}"
        )
    return size


def noted(artifact: Artifact) -> int:
    """The number of ranks in graph.json, which is read only if the recipe names the pass."""
    named = any(entry.name == TENSOR_PARALLEL for entry in artifact.recipe.entries)
    return int(artifact.annotations().get(TENSOR_PARALLEL) or 1) if named else 1


def for_each_rank(options: EngineOptions, size: int) -> EngineOptions:
    """``options`` of a rank: a part of the KV cache and of the cores."""
    bytes_of_rank = None if options.kv_cache_bytes is None else max(1, options.kv_cache_bytes // size)
    threads = options.threads or max(1, usable_cores() // size)
    return msgspec.structs.replace(options, kv_cache_bytes=bytes_of_rank, threads=threads)

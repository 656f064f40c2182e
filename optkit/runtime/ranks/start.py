"""Starting the ranks of an engine: number, processes, and the model of rank 0."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
import torch

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.parallel.rank_graph import TENSOR_PARALLEL
from optkit.parallel.sizes import check_size
from optkit.recipe.engine_options import EngineOptions, flag
from optkit.runtime.embedding import Embedder
from optkit.runtime.ranks.leader import Ranks
from optkit.runtime.ranks.model import RankModel, communicator, load_rank
from optkit.runtime.types import EngineRefusal

OPTION = "tensor_parallel_size"


@dataclass(frozen=True)
class RankZero:
    """The model of rank 0, and the processes of the other ranks."""

    model: RankModel
    ranks: Ranks


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bytes_of_rank = None if options.kv_cache_bytes is None else max(1, options.kv_cache_bytes // size)
    threads = options.threads or max(1, cores // size)
    return msgspec.structs.replace(options, kv_cache_bytes=bytes_of_rank, threads=threads)


def start(artifact: Artifact, options: EngineOptions, size: int) -> RankZero:
    """Start the other ranks, and load the share of rank 0 meanwhile. ``options`` are for a single rank.

    Raises:
        UserError: a rank could not load its share.
    """
    torch.set_num_threads(options.threads)
    file = region_file(size)
    ranks = Ranks.start(
        str(artifact.directory), size, options.threads, file, trust_code=options.trust_artifact_code
    )
    try:
        own = communicator(0, size, options.threads, file, ranks.meeting)
        ranks.communicator = own
        model = load_rank(artifact, own, trust_code=options.trust_artifact_code)
        ranks.weight_bytes = model.weight_bytes + ranks.wait_loaded()
    except BaseException:
        ranks.close()
        raise
    return RankZero(model, ranks)


def region_file(size: int) -> int:
    """The descriptor of the memory in which ranks exchange tensors."""
    from optkit.kernels.cpu import shared_memory

    num_bytes = int(native.library().optkit_region_bytes(size)) if native.available() else 0
    fd = shared_memory.new_file(num_bytes)
    os.set_inheritable(fd, True)
    return fd


def no_embedder() -> Embedder:
    """Refuse embeddings, which need the graph of a single process."""
    raise EngineRefusal(f"embeddings are computed by engines of one rank ({flag(OPTION)} 1)")

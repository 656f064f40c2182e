"""The processes of an engine, and the options of each."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.machine.target import usable_cores
from optkit.parallel.sizes import NOT_BOTH, PIPELINE_PARALLEL, TENSOR_PARALLEL, check_size, check_stages
from optkit.recipe.engine_options import EngineOptions, flag

NOT_WITH_RANKS = {
    "kv_offload_bytes": "ranks do not offload KV",
    "rolling_window": "ranks keep the KV of all tokens",
}
CHECKS = {TENSOR_PARALLEL: check_size, PIPELINE_PARALLEL: check_stages}


@dataclass(frozen=True)
class Sharing:
    """``size`` processes that share a model.

    Attributes:
        kind: ``TENSOR_PARALLEL``, every layer is shared, or ``PIPELINE_PARALLEL``, each has some of the layers.
    """

    size: int = 1
    kind: str = TENSOR_PARALLEL

    @property
    def by_layers(self) -> bool:
        """True where each process has some of the layers."""
        return self.kind == PIPELINE_PARALLEL

    @property
    def option(self) -> str:
        """The option of the size, as a flag."""
        return flag(option(self.kind))


def option(kind: str) -> str:
    """The name of the option with the number of processes of a kind."""
    return f"{kind}_size"


def sharing(artifact: Artifact, options: EngineOptions) -> Sharing:
    """The processes that the options ask for, else the artifact, else one. Reads no weight.

    Raises:
        UserError: the model can't be shared so, or the options need a single process.
    """
    asked = {kind: getattr(options, option(kind)) for kind in CHECKS}
    wanted = {kind: asked[kind] or noted(artifact, kind) for kind in CHECKS}
    several = [Sharing(size, kind) for kind, size in wanted.items() if size > 1]
    if not several:
        return Sharing()
    found = several[0]
    fix = f"{found.option} 1"
    if len(several) > 1:
        raise UserError(NOT_BOTH, where=several[1].option, fix=f"{fix}, or {several[1].option} 1")
    where = found.option if asked[found.kind] else str(artifact.directory)
    CHECKS[found.kind](artifact.meta(), found.size, where)
    if artifact.recipe.target != "cpu":
        raise UserError("ranks are served on CPUs alone", where=where, fix=fix)
    for name, what in NOT_WITH_RANKS.items():
        if getattr(options, name):
            raise UserError(what, where=flag(name), fix=f"leave it out, or {fix}")
    return found


def noted(artifact: Artifact, kind: str) -> int:
    """The number of ranks in graph.json, which is read only if the recipe names the pass."""
    named = any(entry.name == kind for entry in artifact.recipe.entries)
    return int(artifact.annotations().get(kind) or 1) if named else 1


def for_each_rank(options: EngineOptions, shared: Sharing) -> EngineOptions:
    """``options`` of a rank. Ranks that share layers have a part of the KV cache and of the cores each.

    Of ranks with layers of their own one computes at a time, so each has all cores; the KV cache is sized whole.
    """
    if shared.by_layers:
        return msgspec.structs.replace(options, threads=options.threads or usable_cores())
    bytes_of_rank = None if options.kv_cache_bytes is None else max(1, options.kv_cache_bytes // shared.size)
    threads = options.threads or max(1, usable_cores() // shared.size)
    return msgspec.structs.replace(options, kv_cache_bytes=bytes_of_rank, threads=threads)

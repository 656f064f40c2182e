"""The memory of a loaded artifact: an estimate before the first load, then the plan of the engine."""

from __future__ import annotations

from pathlib import Path

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.machine.memory import available_bytes
from optkit.recipe import speculation
from optkit.recipe.engine_options import NO_SPECULATION, EngineOptions, engine_options
from optkit.runtime.info import EngineInfo

OVERHEAD_BYTES = (
    256 << 20
)  # of an engine process and its application; 180 and 40 MiB on Linux with torch 2.13
PACKED = 1.2  # packed weights to those in files: 1.16 for int8 with groups of 32
WEIGHTS = ".safetensors"
SHARE = 0.8  # of the available memory, by default
GUESSERS = (*speculation.GUESSERS, NO_SPECULATION)  # speculative models that are no artifacts


def estimated_bytes(artifact: Artifact, options: EngineOptions) -> int:
    """Bytes of an engine of ``artifact``, from the sizes of the files and the options.

    Raises:
        UserError: the KV cache has no size, because a GPU gives the memory left.
    """
    if options.kv_cache_bytes is None:
        raise UserError(
            "several models on one GPU need a KV cache of fixed size each",
            where=str(artifact.directory),
            fix="give --kv-cache-bytes, such as 4GiB",
        )
    return _weight_bytes(artifact) + options.kv_cache_bytes + OVERHEAD_BYTES + _beside_bytes(options)


def planned_bytes(info: EngineInfo, artifact: Artifact, options: EngineOptions) -> int:
    """Bytes of a loaded engine: the plan, or a greater estimate."""
    plan = info.memory_plan
    known = plan.weight_bytes + plan.workspace_bytes + plan.num_bytes + plan.state_bytes
    return max(estimated_bytes(artifact, options), known + OVERHEAD_BYTES + _beside_bytes(options))


def default_budget() -> int:
    """The budget without ``--memory-budget``."""
    return int(available_bytes() * SHARE)


def _weight_bytes(artifact: Artifact) -> int:
    files = artifact.manifest["files"]
    return int(PACKED * sum(entry["bytes"] for name, entry in files.items() if name.endswith(WEIGHTS)))


def _beside_bytes(options: EngineOptions) -> int:
    """Bytes outside of the engine's own plan: offloaded KV in memory, and a guessing model."""
    host = options.kv_offload_bytes if options.kv_offload_bytes and not options.kv_offload_dir else 0
    guesser = options.speculative_model
    return host + (0 if guesser is None or guesser in GUESSERS else _guesser_bytes(Path(guesser)))


def _guesser_bytes(directory: Path) -> int:
    """Bytes of weights and KV cache of a guessing artifact."""
    artifact = Artifact.open(directory, verify=False)
    return _weight_bytes(artifact) + (engine_options(artifact.recipe).kv_cache_bytes or 0)

"""The interface of the pipeline to compiled layers (the pass ``compile``).

A graph without a compile plan passes through unchanged. Compilation is kept out of the main path; the reasons are in
docs/decisions/0009-compiled-code.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.graph.ir import Graph
from optkit.lowering.compiled import hook
from optkit.lowering.compiled.code_cache import cached_tier, copy_to
from optkit.lowering.compiled.plan import PLAN
from optkit.lowering.lower import Executable
from optkit.lowering.precision import compute_dtype
from optkit.machine.target import Target
from optkit.passes.base import Progress
from optkit.pipeline.aot_compile import prebuild, rebuild
from optkit.pipeline.records import PassRecord
from optkit.recipe.schema import Recipe


def build_code(graph: Graph, record: PassRecord, recipe: Recipe, target: Target, progress: Progress) -> bool:
    """Compile the planned layers of ``graph``; False, with the pass rolled back in ``record``, if none is faster."""
    if PLAN not in graph.annotations:
        return True
    built = prebuild(graph, recipe, target, progress)
    record.stats["compiled"] = built.rows
    if built.tier is None:
        record.decided("rolled back", f"compiled: 0 of {len(built.rows)} variants kept, none is faster")
    return built.tier is not None


def ensure_code(graph: Graph, recipe: Recipe, target: Target, progress: Progress) -> None:
    """Compile the planned layers of ``graph`` where their code is no longer in the private cache."""
    if PLAN in graph.annotations and cached_tier(graph, target) is None:
        rebuild(graph.clone(), recipe, target, progress)


def lower_with_code(
    graph: Graph, recipe: Recipe, target: Target, progress: Progress, **options: Any
) -> Executable:
    """``graph`` lowered for ``target``, with compiled layers; ``options`` are those of ``lower``."""
    ensure_code(graph, recipe, target, progress)
    dtype = compute_dtype(recipe.runtime.compute_dtype)
    return hook.lower_with_code(graph, target, dtype=dtype, **options)


def write_code(graph: Graph, target: Target, directory: Path) -> None:
    """Write the compiled layers of ``graph`` to ``directory``; nothing where there are none."""
    if tier := cached_tier(graph, target):
        copy_to(tier, directory)

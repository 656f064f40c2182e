"""The interface of compiled layers for lowering, cost model and artifacts.

A graph without a compile plan passes through unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.graph.ir import Graph
from optkit.lowering.compiled.code_cache import find_code
from optkit.lowering.compiled.plan import PLAN
from optkit.lowering.lower import Executable, lower

if TYPE_CHECKING:
    from optkit.machine.target import Target


def lower_with_code(
    graph: Graph, target: Target, *, native: Path | None = None, trust: bool = False, **options: Any
) -> Executable:
    """``lower``, with compiled layers where their code is in ``native``, an artifact's code tier, or in the cache.

    Code runs if this user made it on this machine, or with ``trust``; nothing is compiled.
    """
    return lower(graph, target, specialize=find_code(graph, target, native, trust=trust), **options)


def fused_nodes(graph: Graph) -> set[str]:
    """Names of the nodes inside compiled layers."""
    plan = graph.annotations.get(PLAN)
    return {name for region in plan["regions"] for name in region} if plan else set()

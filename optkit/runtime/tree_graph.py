"""The graph of a model that takes trees of guesses: attention reads the positions of the new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.states import has_bounds, recurrent_of
from optkit.lowering.bind import kernel_of
from optkit.lowering.compiled.plan import PLAN

if TYPE_CHECKING:
    from optkit.machine.target import Target

POSITIONS = "positions"
NATIVE = "native"  # the name of the kernels that take trees


class TreeGraph:
    """Makes the graph of ``optkit.artifact.open.Artifact.executable``.

    Attributes:
        reason: against trees, for a graph left as given; empty for a graph with trees.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.reason = target, ""

    def __call__(self, graph: Graph) -> Graph:
        self.reason = refusal(graph, self.target)
        return graph if self.reason else with_positions(graph)


def refusal(graph: Graph, target: Target) -> str:
    """The reason for which steps of ``graph`` take no trees, or an empty text."""
    if target.kind != "cpu":
        return "the kernels for GPUs take no trees"
    if recurrent_of(graph.meta.states):
        return "a recurrent state has no branches"
    if any(kv_layout(graph.meta.states).windows):
        return "layers with a window give blocks back"
    if has_bounds(graph.meta.states):
        return "kv_select chooses blocks for tokens of one sequence"
    if PLAN in graph.annotations:
        return "compiled layers take no trees"
    kernels = [kernel_of(graph, node, target) for node in graph.calls(*ATTENTION)]
    if any(kernel is None or kernel.name != NATIVE for kernel in kernels):
        return "attention runs without optkit's native kernel (pass flash_attention)"
    return ""


def with_positions(graph: Graph) -> Graph:
    """A copy of ``graph`` whose attention ops read the positions of the new tokens."""
    found = graph.clone()
    for node in found.calls(*ATTENTION):
        place = ops.op_of(node).positions[POSITIONS]
        args = [*node.args, *[None] * (place - len(node.args))]
        node.args = (*args, found.input(POSITIONS))
    return found

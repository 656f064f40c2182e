"""Mixture-of-experts layers for passes that quantize: routers, patterns of some experts, tokens of each expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.quantization.targets import matches_any, members

ROUTER = "it chooses the experts of tokens, and a router stays in float"
SOME_EXPERTS = "some of its experts are on the ignore list, and the experts of a layer are quantized together"


def routers(graph: Graph) -> set[fx.Node]:
    """The linear layers whose results choose the experts of tokens, through any ops outside of the dialect."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = [ops.argument(node, "experts") for node in graph.calls(*ops.OF_EXPERTS.values())]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target is reference.linear:
            found.add(node)
        elif ops.record_of(node.target) is None:
            waiting += node.all_input_nodes
    return found


def some_experts(patterns: Sequence[str], graph: Graph, node: fx.Node, name: str) -> bool:
    """True where ``patterns`` name some and not all of the experts of ``node``."""
    if node.target is not reference.expert_linear or matches_any(patterns, name):
        return False
    return not all(matches_any(patterns, member) for member in members(graph, node, name))

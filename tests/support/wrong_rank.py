"""A rank with a wrong weight, which checks of ranks must find."""

from __future__ import annotations

from optkit.graph.ir import Graph
from optkit.parallel.check import GraphOfRank


def with_wrong_weights(graph_of: GraphOfRank) -> GraphOfRank:
    """``graph_of`` with the down projections of rank 1 in another order."""

    def other(graph: Graph, rank: int, size: int) -> Graph:
        part = graph_of(graph, rank, size)
        for name, weight in part.weights.items():
            if "down_proj" in name and rank == 1:
                weight.value = weight.value.flip(1)
        return part

    return other

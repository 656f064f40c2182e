"""The check of a model in several ranks: all ranks in a single process against the unshared graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.parallel.in_threads import in_threads
from optkit.parallel.rank_graph import rank_graph

if TYPE_CHECKING:
    from optkit.machine.target import Target


# Makes the graph of a rank, of so many: ``rank_graph`` or ``stage_graph``.
GraphOfRank = Callable[[Graph, int, int], Graph]

CHECKED_BYTES = (
    2 << 30
)  # of weights: a larger model is checked by shapes alone, since the check needs them twice
CHECKED_TOKENS = 8
TOLERANCE = 1e-3  # of the largest logit: far above rounding, far below a wrong share


@dataclass(frozen=True)
class Comparison:
    """Logits of ranks against the logits of the unshared graph.

    Attributes:
        error: the largest difference, over all ranks.
        largest: the largest magnitude of a logit.
        is_equal: true where all ranks give the bits of the unshared graph.
    """

    error: float
    largest: float
    is_equal: bool


def compare(
    graph: Graph, size: int, ids: Tensor, target: Target | None = None, graph_of: GraphOfRank = rank_graph
) -> Comparison:
    """Logits of the prompt ``ids`` [T] by ``size`` ranks, in threads, against ``graph`` itself.

    Without a ``target`` both sides run the reference kernels.
    """
    expected = lower(graph, target)(dense_inputs([len(ids)], ids, graph.meta.states))
    found = rank_logits(graph, size, ids, target, graph_of)
    error = max(float((each - expected).abs().max()) for each in found)
    return Comparison(error, float(expected.abs().max()), all(torch.equal(each, expected) for each in found))


def rank_logits(
    graph: Graph, size: int, ids: Tensor, target: Target | None = None, graph_of: GraphOfRank = rank_graph
) -> list[Tensor]:
    """The logits [T, V] of each of ``size`` ranks, which run in threads."""
    models: list[Executable] = lower_ranks(graph, size, target, graph_of)

    def run(rank: int) -> Tensor:
        with torch.inference_mode():
            return models[rank](dense_inputs([len(ids)], ids, models[rank].states))

    return in_threads(run, size)


def lower_ranks(
    graph: Graph, size: int, target: Target | None = None, graph_of: GraphOfRank = rank_graph
) -> list[Executable]:
    """The executables of ``size`` ranks, for threads."""
    return in_threads(lambda rank: lower(graph_of(graph, rank, size), target), size)


def prove(graph: Graph, size: int, where: str, graph_of: GraphOfRank) -> dict[str, float]:
    """The largest share of the weights in a rank, and the difference of the ranks' logits from those of ``graph``.

    Raises:
        UserError: the ranks' logits differ from those of one process.
    """
    shapes = graph.clone()
    for weight in shapes.weights.values():
        weight.value = weight.on_meta()
    parts = [graph_of(shapes, rank, size).num_bytes() for rank in range(size)]
    stats = {"share of weights": max(parts) / graph.num_bytes()}
    if not graph.is_meta and graph.num_bytes() <= CHECKED_BYTES:
        ids = torch.arange(CHECKED_TOKENS) % graph.meta.vocab_size
        found = compare(graph, size, ids, graph_of=graph_of)
        if not found.error <= TOLERANCE * found.largest:
            what = f"the logits of {size} ranks differ from those of one process by {found.error:.2g}"
            raise UserError(what, where=where, fix="leave the pass out, and report the model")
        stats["logit error"] = found.error
    return stats

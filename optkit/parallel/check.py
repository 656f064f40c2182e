"""The check of a tensor-parallel model: all ranks in a single process against the unshared graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optkit.graph.ir import Graph
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.parallel.in_threads import in_threads
from optkit.parallel.rank_graph import rank_graph

if TYPE_CHECKING:
    from optkit.machine.target import Target


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


def compare(graph: Graph, size: int, ids: Tensor, target: Target | None = None) -> Comparison:
    """Logits of the prompt ``ids`` [T] by ``size`` ranks, in threads, against ``graph`` itself.

    Without a ``target`` both sides run the reference kernels.
    """
    expected = lower(graph, target)(dense_inputs([len(ids)], ids, graph.meta.states))
    found = rank_logits(graph, size, ids, target)
    error = max(float((each - expected).abs().max()) for each in found)
    return Comparison(error, float(expected.abs().max()), all(torch.equal(each, expected) for each in found))


def rank_logits(graph: Graph, size: int, ids: Tensor, target: Target | None = None) -> list[Tensor]:
    """The logits [T, V] of each of ``size`` ranks, which run in threads."""
    models: list[Executable] = lower_ranks(graph, size, target)

    def run(rank: int) -> Tensor:
        with torch.inference_mode():
            return models[rank](dense_inputs([len(ids)], ids, models[rank].states))

    return in_threads(run, size)


def lower_ranks(graph: Graph, size: int, target: Target | None = None) -> list[Executable]:
    """The executables of ``size`` ranks, for threads."""
    return in_threads(lambda rank: lower(rank_graph(graph, rank, size), target), size)

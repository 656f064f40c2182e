"""Speed of models that do not fit in memory: short models of a graph stand for the whole.

The time of a step is the time of head and tail, and for each class of layers the time of a layer times their number
(``short_models``). So the whole is a sum of short models, each with a factor: a model with k of n layers of a class has
the factor n / k, the model without layers the rest, which may be negative. The parts of a sum share their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optkit.errors import UserError
from optkit.evaluation.short_models import Parts
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.graph.variants import SharedWeights
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import Target

LAYERS = 4  # of a class in a short model, as many as fit


@dataclass(frozen=True)
class Term:
    """A short model, and its factor in the sum."""

    factor: float
    graph: Graph


def terms_of(graph: Graph, point: Point, block_size: int, layers: int) -> list[Term]:
    """The short models with up to ``layers`` layers of each class, whose sum stands for ``graph``.

    Raises:
        UserError: the layers of the graph can't be taken apart.
    """
    graph = variants.at(graph, point.tokens)
    parts = Parts(graph, infer_shapes(graph, point, block_size))
    if not parts.can_be_cut:
        raise UserError(
            f"the model takes {graph.num_bytes() / 1e9:.1f} GB in float32, too much to measure its speed as a whole, "
            "and its layers can't be measured one by one",
            fix="use a machine with more memory",
        )
    found = [Term(len(c) / len(c[:layers]), parts.short(c[:layers])) for c in parts.classes.values()]
    return [Term(1.0 - sum(term.factor for term in found), parts.short([])), *found]


def fitting_terms(graphs: Sequence[Graph], point: Point, block_size: int, limit: int) -> list[list[Term]]:
    """``terms_of`` each of ``graphs``, with as many layers as ``limit`` bytes of weights hold; one at least."""
    for layers in range(LAYERS, 0, -1):
        terms = [terms_of(graph, point, block_size, layers) for graph in graphs]
        if sum(max(term.graph.num_bytes() for term in side) for side in terms) <= limit:
            break
    return terms


def lower_terms(terms: Sequence[Term], target: Target) -> list[tuple[float, Executable]]:
    """The short models lowered, with their factors."""
    shared = SharedWeights([term.graph for term in terms])
    return [(term.factor, lower(term.graph, target, shared=shared)) for term in terms]

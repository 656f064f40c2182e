"""How much a model changes when a single layer is quantized: the KL divergence of its outputs.

The float graph is walked layer by layer; at each, only the rest of the graph is run, once for every variant of that
layer. So the whole measurement costs half a forward pass a variant. Text is the calibration text: what is decided by
sensitivity is judged on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.graph.walk import Walk
from optkit.quality import mean_kl


def float_logits(graph: Graph, walk: Walk) -> list[Tensor]:
    """The logits that variants are compared with, of each window."""
    return list(walk.finish(graph))


def variant_kl(walk: Walk, x: fx.Node, variants: Sequence[Graph], expected: Sequence[Tensor]) -> list[float]:
    """Mean KL of each variant, which differs from the walk's graph in layers that read ``x``, over all windows."""
    for _ in walk.values(x):
        pass
    return [mean_kl(zip(expected, walk.finish(variant), strict=True)) for variant in variants]


def site_sensitivity(
    base: Graph, variants: Iterable[tuple[str, str, Graph]], walk: Walk
) -> Iterator[tuple[str, float]]:
    """For each site, in execution order, the KL of the variant in which it alone is quantized.

    Args:
        base: the float graph that ``walk`` goes over.
        variants: of each site its name, that of the activation it reads, and the graph.
    """
    expected = float_logits(base, walk)
    by_name = {node.name: node for node in walk.graph.fx.nodes}
    for site, x, variant in variants:
        yield site, variant_kl(walk, by_name[x], [variant], expected)[0]

"""Sensitivity of a model to each single quantized layer: the KL divergence of the model's outputs.

The float graph is walked layer by layer. At each layer only the rest of the graph runs, once for every variant of the
layer, so the whole measurement costs half a forward pass a variant. The logits of a position cost as much as several
layers, so every second position is scored, and more text is read. The text is calibration text; decisions made by
sensitivity are judged on held-out text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from optkit.calibration.walk import Walk
from optkit.evaluation.quality import mean_kl
from optkit.graph.ir import Graph

EVERY = 2  # every second position is scored


class Divergence:
    """The reference for variants of ``graph``: the logits of the first windows of a walk.

    The windows hold ``tokens`` tokens at least; the walk may stand anywhere, and go on later.
    """

    def __init__(self, graph: Graph, walk: Walk, tokens: int) -> None:
        self.walk, self.count, held = walk, 0, 0
        while held < tokens and self.count < len(walk.windows):
            held += len(walk.windows[self.count])
            self.count += 1
        self.expected = list(walk.finish(graph, self.count, EVERY))

    def of(self, variant: Graph) -> float:
        """Mean KL of ``variant``, which differs from the walk's graph only after where the walk stands."""
        return mean_kl(zip(self.expected, self.walk.finish(variant, self.count, EVERY), strict=True))


def site_sensitivity(
    base: Graph, variants: Iterable[tuple[str, str, Graph]], walk: Walk
) -> Iterator[tuple[str, float]]:
    """Yield each site, in execution order, with the KL divergence of the variant with only the site quantized.

    Args:
        base: the float graph of ``walk``.
        variants: for each site the name, the name of the input activation, and the graph.
    """
    divergence = Divergence(base, walk, sum(map(len, walk.windows)))
    by_name = {node.name: node for node in walk.graph.fx.nodes}
    for site, x, variant in variants:
        for _ in walk.values(by_name[x]):
            pass
        yield site, divergence.of(variant)

"""Replacement of a graph's linears by quantized linears, for all steps or for steps of few tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from optkit.checkpoint.insertion import FLOAT_ORIGIN, FloatOrigin, float_layer, insert
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Site
from optkit.passes.quantization.formats import WeightFormat


class QuantizedLinearRewriter:
    """Replaces linears of ``graph`` and keeps the float layers.

    With a ``limit`` the quantized layers are for steps of up to ``limit`` tokens, from ``finish`` on. Before, they
    serve every step: later calibration sees the rounding of earlier layers.
    """

    def __init__(self, graph: Graph, limit: int | None = None) -> None:
        self.graph, self.limit = graph, limit
        self.replaced: list[fx.Node] = []

    def replace(self, site: Site, fmt: WeightFormat, operands: Mapping[str, Tensor]) -> fx.Node:
        """Put the op of ``fmt`` on ``operands`` in the place of the site's linear; returns the op."""
        (linear,) = site.nodes
        shape = self.graph.linear_shape(linear)
        origin = FloatOrigin.of(self.graph, linear, site.name)
        out = insert(self.graph, linear, fmt.layer(site.name, (shape[0], shape[1]), operands))
        out.meta[FLOAT_ORIGIN] = origin
        self.replaced.append(out)
        return out

    def finish(self) -> None:
        """Restore the float layers for steps of more tokens than the limit; remove unread nodes."""
        if self.limit is not None:
            positions = self.graph.input("positions")
            for node in self.replaced:
                self.choose(node, positions, self.limit)
        self.graph.prune()

    def choose(self, few: fx.Node, positions: fx.Node, limit: int) -> None:
        """Make ``few`` the variant for steps of up to ``limit`` tokens, beside the float layer for larger steps."""
        origin: FloatOrigin = few.meta[FLOAT_ORIGIN]
        origin.restore(self.graph)
        with self.graph.fx.inserting_after(few):
            many = float_layer(self.graph, few, origin.weight_name)
        with self.graph.fx.inserting_after(many):
            chosen = self.graph.fx.call_function(reference.by_tokens)
        few.replace_all_uses_with(chosen)
        chosen.args = (few, many, positions, limit)


def variant_name(module: str, limit: int) -> str:
    """The name of a module's variant for steps of up to ``limit`` tokens."""
    return f"{module}.up_to_{limit}_tokens"

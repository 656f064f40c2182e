"""Complex numbers of an exported graph as pairs of real tensors.

Some families (Llama 4, DeepSeek-V2) rotate q and k as complex numbers: ``view_as_complex(x) * polar(1, angles)``. The
dialect has no complex dtype, so a complex value becomes its real and imaginary parts, with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from optkit.capture.exported_graph import call

aten = torch.ops.aten
Pair = tuple[fx.Node, fx.Node]
# Ops that move numbers without a look at them: the same for both parts. Complex values keep their dimensions.
MOVES = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor,
    aten.select.int, aten.expand.default, aten.transpose.int, aten.permute.default, aten.clone.default,
    aten.alias.default, aten.index.Tensor,
}  # fmt: skip


def as_pairs(graph: fx.Graph) -> None:
    """Replace complex values by pairs of real ones, in place; an op without a rule stays, and flattening refuses it."""
    pairs: dict[fx.Node, Pair] = {}
    for node in list(graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        if node.target is aten.view_as_real.default and node.args[0] in pairs:
            with graph.inserting_before(node):
                real = call(graph, aten.stack.default, list(pairs[node.args[0]]), -1)
            node.replace_all_uses_with(real)
        elif is_complex(node):
            with graph.inserting_before(node):
                pairs[node] = rule(graph, node, pairs)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in pairs or node.target is aten.view_as_real.default):
            graph.erase_node(node)


def is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.is_complex()


def from_polar(graph: fx.Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    size, angle = node.args
    parts = (call(graph, op, angle) for op in (aten.cos.default, aten.sin.default))
    real, imaginary = (call(graph, aten.mul.Tensor, size, part) for part in parts)
    return real, imaginary


def from_real(graph: fx.Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    real, imaginary = (call(graph, aten.select.int, node.args[0], -1, part) for part in (0, 1))
    return real, imaginary


def product(graph: fx.Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    first, second = node.args
    if first not in pairs:
        first, second = second, first
    a, b = pairs[first]
    if not is_complex(second):
        real, imaginary = (call(graph, aten.mul.Tensor, part, second) for part in (a, b))
        return real, imaginary
    c, d = pairs[second]
    ac, bd, ad, bc = (call(graph, aten.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (a, d), (b, c)))
    return call(graph, aten.sub.Tensor, ac, bd), call(graph, aten.add.Tensor, ad, bc)


def moved(graph: fx.Graph, node: fx.Node, pairs: dict[fx.Node, Pair]) -> Pair:
    real, imaginary = (call(graph, node.target, part, *node.args[1:]) for part in pairs[node.args[0]])
    return real, imaginary


Rule = Callable[[fx.Graph, fx.Node, dict[fx.Node, Pair]], Pair]
RULES: dict[Any, Rule] = {
    aten.polar.default: from_polar,
    aten.view_as_complex.default: from_real,
    aten.view_as_real.default: from_real,  # the way back, which ``as_pairs`` handles
    aten.mul.Tensor: product,
    **dict.fromkeys(MOVES, moved),
}

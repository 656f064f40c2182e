"""Helpers on nodes of a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from optkit.capture.nodes import is_call, is_last_dim, operands

aten = torch.ops.aten


def call(graph: fx.Graph, target: object, *args: object, shape: tuple[int | None, ...] = ()) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["shape"] = shape
    return node


def test_operands_are_in_the_order_that_was_asked_for() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    neg = call(graph, aten.neg.default, x)
    for args in ((neg, x), (x, neg)):
        added = call(graph, aten.add.Tensor, *args)
        assert operands(added, aten.add.Tensor, lambda a: is_call(a, aten.neg.default)) == (neg, x)
    assert operands(added, aten.mul.Tensor, lambda a: True) is None
    assert operands(added, aten.add.Tensor, lambda a: is_call(a, aten.abs.default)) is None
    assert operands(neg, aten.neg.default, lambda a: True) is None


def test_last_dimension_may_be_counted_from_both_ends() -> None:
    node = call(fx.Graph(), torch.zeros, shape=(None, 4, 8))
    assert [is_last_dim(node, dim) for dim in (-1, 2, [2], [-1], 1, [1, 2], -2)] == [True] * 4 + [False] * 3

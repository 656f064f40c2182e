"""Counts of a call's tokens: allowed as indices, replaced by positions as values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from optkit.capture.counters import count_from_positions, refuse_counters
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
from tests.support.graphs import captured

aten = torch.ops.aten
Use = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def with_count(use: Use) -> Graph:
    """A model's graph with an ``arange`` over the tokens of the call, and ``use`` of the count."""
    graph = captured("llama")
    ids = next(node for node in graph.fx.nodes if node.target == "input_ids")
    after = next(node for node in graph.fx.nodes if node.op == "call_function")
    with graph.fx.inserting_before(after):
        size = graph.fx.call_function(aten.sym_size.int, (ids, 0))
        count = graph.fx.call_function(aten.arange.default, (size,))
        count.meta["dtype"] = torch.int64
        use(graph.fx, ids, count)
    return graph


def as_index(graph: fx.Graph, ids: fx.Node, count: fx.Node) -> fx.Node:
    chosen = graph.call_function(aten.index_select.default, (ids, 0, count))
    chosen.meta["dtype"] = torch.float32
    return chosen


def as_value(graph: fx.Graph, ids: fx.Node, count: fx.Node) -> fx.Node:
    value = graph.call_function(aten._to_copy.default, (count,), {"dtype": torch.float32})
    value.meta["dtype"] = torch.float32
    return value


def as_value_later(graph: fx.Graph, ids: fx.Node, count: fx.Node) -> fx.Node:
    later = graph.call_function(aten.add.Tensor, (count, ids))
    later.meta["dtype"] = torch.int64
    return as_value(graph, ids, later)


def test_a_count_may_be_an_index() -> None:
    graph = with_count(as_index)
    assert not count_from_positions(graph)
    refuse_counters(graph)


def test_a_count_of_a_prompt_becomes_the_positions() -> None:
    def as_scale(graph: fx.Graph, ids: fx.Node, count: fx.Node) -> fx.Node:
        later = graph.call_function(aten.add.Tensor, (count, 1))
        later.meta["dtype"] = torch.int64
        scale = as_value(graph, ids, later)
        norm = next(node for node in graph.nodes if node.target is reference.rms_norm)
        with graph.inserting_after(norm):
            scaled = graph.call_function(aten.mul.Tensor, (norm, scale))
        norm.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return scale

    graph = with_count(as_scale)
    assert count_from_positions(graph)
    refuse_counters(graph)
    (read,) = (n.args[0] for n in graph.fx.nodes if n.target is aten.add.Tensor and n.args[1] == 1)
    assert read.target == "positions" and not list(graph.calls(aten.arange.default))


@pytest.mark.parametrize("use", [as_value, as_value_later])
def test_a_count_may_not_be_a_float(use: Use) -> None:
    with pytest.raises(UnsupportedModel, match="it counts the tokens of a call"):
        refuse_counters(with_count(use))

"""Binding of a node to a kernel: the pinned one or none, and packed weights in the place of the float ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.lowering.bind import bind, kernel_of
from tests.support.graphs import captured
from tests.support.target import TARGET


def first_linear(graph: Graph) -> torch.fx.Node:
    return next(graph.calls(reference.linear))


def packing(name: str, pack: Any) -> Kernel:
    return Kernel("linear", name, max, lambda *given: True, pack)


def test_kernel_of_a_pinned_kernel_that_is_not_there_is_an_error_of_the_user() -> None:
    graph = captured("llama")
    node = first_linear(graph)
    node.meta["kernel"] = "nowhere"
    with pytest.raises(UserError, match="nowhere"):
        kernel_of(graph, node, TARGET)


def test_kernel_of_an_op_outside_of_the_dialect_is_a_bug() -> None:
    graph = captured("llama")
    node = first_linear(graph)
    node.target = max
    with pytest.raises(ValueError, match="is not an op of the dialect"):
        kernel_of(graph, node, TARGET)


def test_bind_replaces_the_weight_by_what_the_kernel_packs() -> None:
    graph = captured("llama")
    node = first_linear(graph)
    name = str(node.args[1].target)
    weight = graph.weights[name].value
    kernel = packing("transposed", lambda weights, options: {1: weights[1].T})
    bind(graph, node, kernel)
    assert node.target is max and name not in graph.weights
    assert torch.equal(graph.weights[str(node.args[1].target)].value, weight.T)


def test_bind_keeps_a_weight_that_another_node_reads() -> None:
    graph = captured("llama")
    node = first_linear(graph)
    name = str(node.args[1].target)
    with graph.fx.inserting_after(node):
        graph.fx.call_function(torch.abs, (node.args[1],))
    bind(graph, node, packing("copied", lambda weights, options: {1: weights[1].clone()}))
    assert name in graph.weights

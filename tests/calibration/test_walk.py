"""The walk over a graph: the same activations as a whole run, only what is needed kept, and going on after a stop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from optkit.calibration.walk import Walk
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.kernels import reference
from optkit.passes.quantization.cost import kept_bytes
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.target import TARGET

WINDOWS = [ids.tolist() for ids in random_ids((24, 9, 17))]


def activation(graph: Graph, node: fx.Node, window: list[int]) -> Tensor:
    """The value of ``node``, by making it the graph's output."""
    graph = graph.clone()
    output = next(n for n in graph.fx.nodes if n.op == "output")
    output.args = (next(n for n in graph.fx.nodes if n.name == node.name),)
    graph.prune()
    return dense(graph, torch.tensor(window))


def inputs(graph: Graph) -> list[fx.Node]:
    """What linears read, each once, in execution order."""
    return list(dict.fromkeys(node.args[0] for node in graph.calls(reference.linear)))


def fused(name: str) -> Graph:
    graph = captured(name)
    for row in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
        apply(graph, row)
    return graph


@pytest.mark.parametrize("name", ["llama", "phi", "mixtral"])
def test_activations_are_those_of_a_whole_run(name: str) -> None:
    graph = captured(name)
    before = graph_to_json(graph)
    walk = Walk(graph, WINDOWS, None)
    for x in inputs(graph):
        for window, value in zip(WINDOWS, walk.values(x), strict=True):
            torch.testing.assert_close(value, activation(graph, x, window), atol=1e-4, rtol=1e-4)
    assert graph_to_json(graph) == before


def test_with_fused_layers_and_native_kernels() -> None:
    graph = fused("llama")
    walk = Walk(graph, WINDOWS, TARGET)
    for x in inputs(graph):
        for window, value in zip(WINDOWS, walk.values(x), strict=True):
            torch.testing.assert_close(value, activation(graph, x, window), atol=1e-4, rtol=1e-4)


def test_it_keeps_the_residual_stream_and_the_activation_and_no_more() -> None:
    graph, tokens = fused("llama"), sum(map(len, WINDOWS))
    walk = Walk(graph, WINDOWS, TARGET)
    expected = kept_bytes(graph, inputs(graph), 32)
    for x, size in zip(inputs(graph), expected, strict=True):
        width = 0
        for value in walk.values(x):
            width = value.shape[1]
        rope = 4 * 2 * 16  # cos and sin of a token, of half a head
        assert walk.num_bytes() <= tokens * (4 * (64 + max(64, width)) + rope)
        assert walk.num_bytes() == size * tokens // 32


def test_what_follows_may_be_rewritten_before_the_walk_goes_on() -> None:
    """Zeroing the first layer's MLP after its input was seen changes all activations behind it, and none before."""
    graph, changed = captured("llama"), captured("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    changed.weights[name].value = torch.zeros_like(changed.weights[name].value)
    walk = Walk(graph, WINDOWS, None)
    for index, x in enumerate(inputs(graph)):
        values = list(walk.values(x))
        if index == 2:
            graph.weights[name].value = changed.weights[name].value
        other = changed if index > 2 else captured("llama")
        torch.testing.assert_close(values[0], activation(other, x, WINDOWS[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_another_walk_goes_on_with_the_same_bits(stop: int) -> None:
    graph = fused("llama")
    first, second = Walk(graph, WINDOWS, TARGET), Walk(fused("llama"), WINDOWS, TARGET)
    for x in inputs(graph)[: stop + 1]:
        list(first.values(x))
    second.restore(first.state())
    for x, y in list(zip(inputs(graph), inputs(second.graph), strict=True))[stop:]:
        for a, b in zip(first.values(x), second.values(y), strict=True):
            assert torch.equal(a, b)


def test_finish_gives_the_logits_and_leaves_the_walk_where_it_is() -> None:
    graph = captured("qwen2")
    walk = Walk(graph, WINDOWS, None)
    for x in inputs(graph)[:4]:
        list(walk.values(x))
        kept = walk.num_bytes()
        for window, logits in zip(WINDOWS, walk.finish(graph.clone()), strict=True):
            torch.testing.assert_close(logits, dense(graph, torch.tensor(window)), atol=1e-4, rtol=1e-4)
        assert walk.num_bytes() == kept


def test_a_value_can_be_scaled_with_what_makes_it() -> None:
    graph = captured("llama")
    walk, x = Walk(graph, WINDOWS, None), inputs(graph)[0]
    before = [value.clone() for value in walk.values(x)]
    walk.change(x, torch.full((64,), 0.5))
    for old, new in zip(before, walk.values(x), strict=True):
        assert torch.equal(new, old * 0.5)


def test_it_finishes_on_some_rows_where_few_rows_are_computed() -> None:
    """After ``select_logits_rows`` the end of the graph works on chosen rows; a walk that stands there has them all."""
    graph = fused("llama")
    apply(graph, "select_logits_rows")
    walk = Walk(graph, WINDOWS, TARGET)
    every = 3
    expected = [dense(graph, torch.tensor(window), TARGET)[every - 1 :: every] for window in WINDOWS]
    for x in inputs(graph):
        for _ in walk.values(x):
            pass
        for logits, whole in zip(walk.finish(graph, every=every), expected, strict=True):
            torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)

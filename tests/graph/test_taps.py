"""Calibration statistics against the activations themselves."""

from __future__ import annotations

import torch

from optkit.graph.dense import dense_inputs
from optkit.graph.ir import Graph
from optkit.graph.lower import lower
from optkit.graph.serialize import graph_to_json
from optkit.graph.taps import channel_absmax
from optkit.kernels import reference
from tests.graphs import TARGET, captured, random_ids


def activation(graph: Graph, name: str, ids: torch.Tensor) -> torch.Tensor:
    """The value of node ``name``, by making it the graph's output."""
    graph = graph.clone()
    output = next(n for n in graph.fx.nodes if n.op == "output")
    output.args = (next(n for n in graph.fx.nodes if n.name == name),)
    graph.prune()
    return lower(graph)(dense_inputs([len(ids)], ids, graph.meta.kv_specs))


def test_absmax_over_all_windows() -> None:
    graph = captured("llama")
    before = graph_to_json(graph)
    nodes = [next(graph.calls(op)) for op in (reference.rms_norm, reference.silu_mul)]
    windows = random_ids((9, 21, 4))
    found = channel_absmax(graph, nodes, [w.tolist() for w in windows], TARGET)
    assert list(found) == ["rms_norm", "silu_mul"]
    for name, value in found.items():
        expected = torch.cat([activation(graph, name, w) for w in windows]).abs().amax(0)
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)
    assert graph_to_json(graph) == before


def test_each_window_counts() -> None:
    graph = captured("llama")
    node = next(graph.calls(reference.silu_mul))
    first, second = (w.tolist() for w in random_ids((16, 16)))
    one, two, both = (
        channel_absmax(graph, [node], windows, TARGET)["silu_mul"]
        for windows in ([first], [second], [first, second])
    )
    torch.testing.assert_close(both, torch.maximum(one, two), atol=0, rtol=0)
    assert (both > one).any() and (both > two).any()


def test_the_same_node_twice_and_no_node() -> None:
    graph = captured("llama")
    node = next(graph.calls(reference.rms_norm))
    window = random_ids([8])[0].tolist()
    assert channel_absmax(graph, [], [window], TARGET) == {}
    assert list(channel_absmax(graph, [node, node], [window], TARGET)) == ["rms_norm"]

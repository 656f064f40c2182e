"""Decoder layers told apart before and after fusion, and the reasons against."""

from __future__ import annotations

import pytest

from optkit.graph.layer_names import layer_number
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes.rewriting.layers import entries, without
from tests.support.graphs import apply, captured

FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox", "opt", "gpt2"])
def test_layers_begin_at_norms_of_the_stream(name: str, fused: bool) -> None:
    graph = captured(name) if name == "gpt2" else captured(name, num_hidden_layers=3)
    for row in FUSIONS if fused else ():
        apply(graph, row)
    found = entries(graph)
    assert not isinstance(found, str), found
    count = len(graph.meta.kv_specs)
    assert [entry.number for entry in found] == list(range(count))
    rms = any(node.target is reference.add_rms_norm for node in graph.fx.nodes)
    assert [entry.fused for entry in found] == [False] + [rms] * (count - 1)


def test_what_is_left_is_numbered_anew() -> None:
    graph = captured("llama", num_hidden_layers=5)
    found = entries(graph)
    assert not isinstance(found, str)
    without(graph, found, {0, 2})
    verify(graph)
    numbers = {layer_number(part.name) for w in graph.weights.values() if w.origin for part in w.origin.parts}
    assert numbers == {None, 0, 1, 2}
    inputs = {str(node.target) for node in graph.fx.nodes if node.op == "placeholder"}
    assert {name for name in inputs if name.startswith("k_cache")} == {f"k_cache_{n}" for n in range(3)}
    assert [spec.layer for spec in graph.meta.kv_specs] == [0, 1, 2]


@pytest.mark.parametrize("name", ["gemma2", "lfm2", "gemma3n_text", "deepseek_v3", "llama4_text"])
def test_unlike_layers_are_not_told_apart(name: str) -> None:
    assert isinstance(entries(captured(name)), str)

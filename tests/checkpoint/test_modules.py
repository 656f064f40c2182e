"""The quantized modules of a graph with fused layers are those of the same graph without."""

from __future__ import annotations

import pytest
import torch

from optkit.checkpoint.modules import modules
from optkit.graph.ir import Graph
from tests.support.graphs import apply, captured


def quantized(*fusions: str, scheme: str) -> Graph:
    graph = captured("llama")
    for name in fusions:
        apply(graph, name)
    apply(graph, "rtn", scheme=scheme, group_size=32)
    return graph


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_modules_of_fused_layers_are_those_of_the_separate_layers(scheme: str) -> None:
    fused = {module.name: module for module in modules(quantized("fuse_qkv", "fuse_gate_up", scheme=scheme))}
    plain = {module.name: module for module in modules(quantized(scheme=scheme))}
    assert len(plain) == 14 and fused.keys() == plain.keys()
    for name, module in plain.items():
        found = fused[name]
        assert (found.shape, found.op, found.operands.keys()) == (
            module.shape,
            module.op,
            module.operands.keys(),
        )
        assert all(torch.equal(found.operands[key], value) for key, value in module.operands.items())


def test_modules_of_a_float_graph_are_none() -> None:
    assert list(modules(captured("llama"))) == []

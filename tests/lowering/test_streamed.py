"""Ops on weights on disk against the same ops on weights in memory."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from optkit.graph.ir import Graph, Weight
from optkit.graph.stored import Place, StoredPart, StoredTensor
from optkit.kernels import reference
from optkit.kernels.cpu import onednn
from optkit.lowering import streamed
from optkit.lowering.lower import lower
from optkit.machine import float_products
from optkit.machine.float_products import has_onednn
from tests.support.graphs import apply, captured, dense, random_ids, relative_error
from tests.support.target import TARGET

(IDS,) = random_ids([23])


def on_disk(graph: Graph) -> Graph:
    """A clone of ``graph`` with every matrix as a stored tensor."""
    clone = graph.clone()
    for name, weight in clone.weights.items():
        if weight.origin is not None and len(weight.shape) == 2:
            value = weight.value.T.contiguous() if weight.origin.transposed else weight.value
            part = StoredPart.of(Place(None, name), lambda value=value: value)  # type: ignore[misc]
            clone.weights[name] = Weight(
                StoredTensor((part,), torch.float32, weight.origin.transposed), weight.origin
            )
    return clone


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi"])
@pytest.mark.parametrize("target", [None, TARGET], ids=["reference", "cpu"])
@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_streamed_graph_has_the_logits_of_the_graph_in_memory(
    architecture: str, target: object, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_products, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(onednn, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(streamed, "BLOCK_BYTES", 5 * 64 * 4)  # several blocks, the last one short
    graph = captured(architecture)
    expected = dense(graph, IDS)
    stored = on_disk(graph)
    model = lower(stored, target, streamed=True)  # type: ignore[arg-type]
    assert model.is_streamed
    multiply = {node.target.multiply for node in model.module.graph.nodes if is_stored_linear(node)}
    by_onednn = target is not None and vendor == "AuthenticAMD" and has_onednn() and "avx2" in TARGET.isa
    assert multiply == {onednn.linear if by_onednn else reference.linear}
    assert relative_error(dense_of(model, graph), expected) < 1e-5
    assert not any(b.numel() * 4 >= 64 * 64 * 4 for b in model.module.buffers())


def is_stored_linear(node: fx.Node) -> bool:
    return isinstance(node.target, streamed.StoredLinear)


def dense_of(model: object, graph: Graph) -> torch.Tensor:
    from optkit.lowering.dense import dense_inputs

    return model(dense_inputs([len(IDS)], IDS, graph.meta.kv_specs))  # type: ignore[operator, no-any-return]


def test_lowered_graph_reads_its_weights_once_and_leaves_the_graph_on_disk() -> None:
    graph = captured("llama")
    stored = on_disk(graph)
    model = lower(stored, TARGET)
    assert not model.is_streamed and torch.equal(dense(graph, IDS, TARGET), dense_of(model, graph))
    assert any(isinstance(weight.stored, StoredTensor) for weight in stored.weights.values())


def test_quantized_layers_of_weights_on_disk_give_the_same_bits() -> None:
    graph, stored = captured("llama"), on_disk(captured("llama"))
    for name in ("fuse_qkv", "fuse_gate_up", "int8"):
        apply(graph, name)
        apply(stored, name)
    assert torch.equal(dense(graph, IDS, TARGET), dense(stored, IDS, TARGET))

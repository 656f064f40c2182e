"""A graph as a differentiable function: logits of the runtime, gradients of transformers, and the merged weights."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.passes.distillation.differentiable import Differentiable, trained_linears, why_not
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.target import TARGET

IDS = torch.stack(random_ids([21, 21]))
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


def fused(name: str) -> Graph:
    graph = captured(name)
    for row in FUSIONS:
        apply(graph, row)
    return graph


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "phi", "gpt_neox"])
def test_logits_are_those_of_the_runtime(name: str) -> None:
    for graph in (captured(name), fused(name)):
        assert why_not(graph) is None
        logits = Differentiable(graph, rank=4).logits(IDS).unflatten(0, (2, -1))
        for window, found in zip(IDS, logits, strict=True):
            expected = dense(graph, window, TARGET)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_gradients_are_those_of_transformers() -> None:
    """With B = 0 the gradient of B is that of the weight, times A transposed."""
    model, graph = tiny_model("llama"), captured("llama")
    student = Differentiable(graph, rank=4)
    weights = torch.randn(IDS.numel(), 128, generator=torch.Generator().manual_seed(2))
    (student.logits(IDS) * weights).sum().backward()
    (model(IDS, use_cache=False).logits.flatten(0, 1) * weights).sum().backward()
    named = dict(model.named_parameters())
    nodes = trained_linears(graph)
    assert len(nodes) == 14
    for node in nodes:
        a, b = student.adapters[node.name]
        gradient = named[str(node.args[1].target)].grad
        assert gradient is not None and b.grad is not None
        torch.testing.assert_close(b.grad, gradient @ a.detach().T, atol=2e-4, rtol=1e-3)


def test_merged_weights_give_the_function_with_adapters() -> None:
    graph = fused("llama")
    student = Differentiable(graph, rank=3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
        expected = student.logits(IDS[:1])
    assert (expected - dense(graph, IDS[0])).abs().max() > 0.1
    for node in trained_linears(graph):
        graph.set_weight(node.args[1], student.merged(node))
    verify(graph)
    torch.testing.assert_close(dense(graph, IDS[0]), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma2", "scores"), ("mixtral", "only float layers"), ("lfm2", "only float layers"), ("gpt_oss", "")],
)
def test_what_is_not_trained(name: str, reason: str) -> None:
    found = why_not(captured(name))
    assert found is not None and reason in found


def test_quantized_layers_are_not_trained() -> None:
    graph = captured("llama")
    apply(graph, "int8")
    assert "only float layers" in (why_not(graph) or "")

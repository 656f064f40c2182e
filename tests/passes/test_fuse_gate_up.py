"""fuse_gate_up: sites, reasons, and the same logits after."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.verify import verify
from optkit.kernels import reference
from tests.support.graphs import (
    apply,
    assert_origins_invert,
    assert_same_logits,
    captured,
    checked,
    checkpoint,
    reasons,
)

ONE_ALREADY = "gate and up already come from one projection"


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen2"])
def test_same_logits_from_fewer_products(name: str) -> None:
    graph = captured(name)
    before, tensors = graph.clone(), checkpoint(graph)
    plan = apply(graph, "fuse_gate_up")
    assert [site.name for site in plan.sites] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    verify(graph)
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    assert len(list(graph.calls(reference.linear))) == len(list(before.calls(reference.linear))) - 2
    after = checkpoint(graph)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[key], value) for key, value in tensors.items())


def test_gate_comes_first() -> None:
    graph = captured("llama")
    apply(graph, "fuse_gate_up")
    origin = graph.weights["model.layers.0.mlp.gate_up_proj.weight"].origin
    assert origin is not None
    assert [p.name for p in origin.parts] == [f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up")]


def test_gelu_keeps_its_approximation() -> None:
    graph = captured("gemma2")
    (before, _) = graph.calls(reference.gelu_mul)
    arguments = (before.args[2:], dict(before.kwargs))
    apply(graph, "fuse_gate_up")
    (after, _) = graph.calls(reference.gelu_mul_packed)
    assert (after.args[1:], dict(after.kwargs)) == arguments
    assert "tanh" in str(arguments)


@pytest.mark.parametrize(("name", "expected"), [("phi3", {ONE_ALREADY}), ("mixtral", set())])
def test_projections_that_are_one_already(name: str, expected: set[str]) -> None:
    _, plan = checked(captured(name), "fuse_gate_up")
    assert not plan.sites
    assert reasons(plan) == expected


def test_a_model_without_gates() -> None:
    _, plan = checked(captured("gpt2"), "fuse_gate_up")
    assert not plan.sites and not plan.skips


def test_a_gate_that_something_else_reads() -> None:
    graph = captured("llama")
    node = next(graph.calls(reference.silu_mul))
    down = next(user for user in node.users if user.target is reference.linear)
    with graph.fx.inserting_before(down):
        both = graph.fx.call_function(torch.ops.aten.add.Tensor, (node, node.args[0]))
    down.args = (both, *down.args[1:])
    _, plan = checked(graph, "fuse_gate_up")
    assert reasons(plan) == {"something else reads the gate or up projection"}
    assert [site.name for site in plan.sites] == ["model.layers.1.mlp"]


def test_fused_after_qkv() -> None:
    graph = captured("llama")
    before = graph.clone()
    for name in ("fuse_qkv", "fuse_gate_up"):
        apply(graph, name)
    verify(graph)
    assert_same_logits(before, graph)
    assert len(list(graph.calls(reference.linear))) == 2 * 4 + 1

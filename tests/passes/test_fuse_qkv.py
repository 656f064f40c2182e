"""fuse_qkv: sites, reasons, and the same logits after."""

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

SEPARATE = "q, k and v are not three separate projections"


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "olmo2", "mixtral"])
def test_same_logits_from_fewer_products(name: str) -> None:
    graph = captured(name)
    before = graph.clone()
    plan = apply(graph, "fuse_qkv")
    assert [site.name for site in plan.sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert not plan.skips
    verify(graph)
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    assert len(list(graph.calls(reference.linear))) == len(list(before.calls(reference.linear))) - 4


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_nothing_changes_on_disk(name: str) -> None:
    graph = captured(name)
    before = checkpoint(graph)
    apply(graph, "fuse_qkv")
    after = checkpoint(graph)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_the_stacked_weight() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    weight = graph.weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert weight.value.shape == (64 + 32 + 32, 64)
    assert weight.origin is not None
    assert [(p.name.split(".")[-2], p.rows) for p in weight.origin.parts] == [
        ("q_proj", 64),
        ("k_proj", 32),
        ("v_proj", 32),
    ]


def test_biases_are_stacked_too() -> None:
    graph = captured("qwen2")
    apply(graph, "fuse_qkv")
    bias = graph.weights["model.layers.1.self_attn.qkv_proj.bias"]
    assert bias.value.shape == (128,)
    assert bias.origin is not None
    assert [p.name for p in bias.origin.parts] == [
        f"model.layers.1.self_attn.{x}_proj.bias" for x in ("q", "k", "v")
    ]


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt_neox"])
def test_projections_that_are_one_already(name: str) -> None:
    graph = captured(name)
    _, plan = checked(graph, "fuse_qkv")
    assert not plan.sites
    assert reasons(plan) == {SEPARATE}
    assert len(plan.skips) == 2


def test_a_bias_on_some_only() -> None:
    graph = captured("qwen2")
    linear = next(graph.calls(reference.linear))
    linear.args = linear.args[:2]
    graph.prune()
    _, plan = checked(graph, "fuse_qkv")
    assert [site.name for site in plan.sites] == ["model.layers.1.self_attn"]
    assert reasons(plan) == {"only some of the projections have a bias"}


def test_different_inputs() -> None:
    graph = captured("llama")
    first, second, *_ = graph.calls(reference.linear)
    with graph.fx.inserting_before(second):
        other = graph.fx.call_function(torch.ops.aten.neg.default, (first.args[0],))
    second.args = (other, second.args[1])
    _, plan = checked(graph, "fuse_qkv")
    assert reasons(plan) == {"the projections read different inputs"}


def test_a_weight_of_no_checkpoint() -> None:
    graph = captured("llama")
    graph.weights["model.layers.0.self_attn.k_proj.weight"].origin = None
    _, plan = checked(graph, "fuse_qkv")
    assert reasons(plan) == {"a weight is not a plain checkpoint tensor"}


def test_a_second_run_finds_nothing() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    _, plan = checked(graph, "fuse_qkv")
    assert not plan.sites
    assert reasons(plan) == {SEPARATE}


def test_check_leaves_the_graph_alone() -> None:
    graph = captured("llama")
    before = [(n.name, str(n.args)) for n in graph.fx.nodes]
    checked(graph, "fuse_qkv")
    assert [(n.name, str(n.args)) for n in graph.fx.nodes] == before

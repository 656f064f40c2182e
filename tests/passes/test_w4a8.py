"""w4a8: which layers, how close, the same between kernels, and beside int8."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from optkit import kernels
from optkit.graph.ir import Graph
from optkit.graph.verify import VerifyError, verify
from optkit.kernels import reference
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.w4a8 import W4A8, W4A8Config
from tests.support.graphs import (
    apply,
    assert_kernels_agree,
    assert_one_layer_agrees,
    assert_origins_invert,
    captured,
    checked,
    checkpoint,
    dense,
    random_ids,
    reasons,
    relative_error,
)
from tests.support.target import TARGET


def quantized(name: str, **options: object) -> Graph:
    graph = captured(name)
    apply(graph, "w4a8", **options)
    return graph


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3", "mixtral"])
def test_close_to_float(name: str, symmetric: bool) -> None:
    graph = quantized(name, symmetric=symmetric)
    verify(graph)
    assert_origins_invert(graph)
    (ids,) = random_ids([24])
    assert 1e-3 < relative_error(dense(graph, ids), dense(captured(name), ids)) < 0.5


@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True}, {"activation_group_size": 0}, {"group_size": 96}]
)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_kernels_agree_and_ragged_is_dense(name: str, options: dict[str, object]) -> None:
    """Between kernels an activation may round to the next of 255 steps, far less than what 4 bits lose."""
    graph = quantized(name, **options)
    assert_kernels_agree(graph, captured(name), "linear_w4a8", 0.2)


def test_one_layer_is_the_same_in_every_kernel() -> None:
    assert_one_layer_agrees(quantized("llama"), reference.linear_w4a8)


def test_weights_are_what_the_float_graph_would_multiply() -> None:
    """The levels replace the weights: with float activations the graph is the float graph of dequantized weights."""
    graph, floats = quantized("llama"), captured("llama")
    for name in list(floats.weights):
        packed = graph.weights.get(f"{name}_packed")
        if packed is not None:
            scale, minimum = (graph.weights[f"{name}_{key}"].value for key in ("scale", "minimum"))
            floats.weights[name].value = reference.dequantize_int4(packed.value, scale, minimum)
    (ids,) = random_ids([24])
    loss = relative_error(dense(graph, ids), dense(captured("llama"), ids))
    assert relative_error(dense(graph, ids), dense(floats, ids)) < 0.2 * loss


def test_sites_and_skips_of_llama() -> None:
    _, plan = checked(captured("llama"), "w4a8")
    assert len(plan.sites) == 14
    assert reasons(plan) == {"the output head stays in float (lm_head: false)"}
    _, plan = checked(captured("llama"), "w4a8", ignore=["re:.*down_proj", "lm_head"], lm_head=True)
    assert len(plan.sites) == 12
    assert reasons(plan) == {"on the ignore list"}


@pytest.mark.parametrize(("symmetric", "bits"), [(True, 4.5), (False, 5.0)])
def test_bits_of_a_weight(symmetric: bool, bits: float) -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "w4a8", symmetric=symmetric)
    stats = optimization.apply(graph, plan, PassContext(TARGET)).stats
    weights = 2 * (64 * 192 + 3 * 64 * 96)
    assert stats["weight_bytes_before"] - stats["weight_bytes_after"] == weights * (32 - bits) / 8


def test_fused_projections_keep_their_names_on_disk() -> None:
    plain, fused = captured("llama"), captured("llama")
    apply(plain, "w4a8")
    for name in ("fuse_qkv", "fuse_gate_up", "w4a8"):
        apply(fused, name)
    verify(fused)
    first, second = checkpoint(plain), checkpoint(fused)
    assert first.keys() == second.keys()
    assert all(torch.equal(second[key], value) for key, value in first.items())
    assert "model.layers.0.self_attn.k_proj.weight_packed" in first


def test_int8_takes_what_w4a8_ignores() -> None:
    graph = quantized("llama", ignore=["down_proj"])
    apply(graph, "int8", group_size=32)
    verify(graph)
    assert len(list(graph.calls(reference.linear_w4a8))) == 12
    assert len(list(graph.calls(reference.linear_w8a8))) == 2
    (ids,) = random_ids([24])
    assert relative_error(dense(graph, ids, TARGET), dense(captured("llama"), ids)) < 0.5


def test_a_tied_head_leaves_the_embedding_alone() -> None:
    graph = captured("gemma2")
    embedding = graph.meta.input_embedding
    before = graph.weights[embedding].value.clone()
    apply(graph, "w4a8", lm_head=True)
    verify(graph)
    assert torch.equal(graph.weights[embedding].value, before)
    assert checkpoint(graph)["lm_head.weight_packed"].shape == (128, 8)


def test_conv1d_is_refused_with_the_reason() -> None:
    _, plan = checked(captured("gpt2"), "w4a8")
    assert not plan.sites
    assert any("transposed, which the int4 format does not express" in reason for reason in reasons(plan))


@pytest.mark.parametrize("options", [{"group_size": 64}, {"activation_group_size": 64}])
def test_a_group_that_does_not_divide(options: dict[str, object]) -> None:
    _, plan = checked(captured("llama"), "w4a8", **options)
    down = "its 96 input channels are not a multiple of the group size 64"
    assert {skip.site for skip in plan.skips if skip.reason == down} == {
        f"model.layers.{i}.mlp.down_proj" for i in (0, 1)
    }
    assert len(plan.sites) == 12


def test_no_kernel_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    assert W4A8(W4A8Config()).check(captured("llama"), PassContext(DATASHEETS["cuda-h100"])).sites
    monkeypatch.setattr(kernels, "table", lambda kind="cpu": ())
    plan = W4A8(W4A8Config()).check(captured("llama"), PassContext(DATASHEETS["cuda-h100"]))
    assert not plan.sites
    assert any("no int4 kernel on cuda-h100" in reason for reason in reasons(plan))


@pytest.mark.parametrize(
    "options", [{"group_size": 16}, {"bits": 4}, {"group_size": 64, "activation_group_size": 32}]
)
def test_options_are_closed(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        W4A8Config(**options)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_minimum", "weight_packed"])
def test_the_verifier_sees_damaged_weights(suffix: str) -> None:
    """Kernels read by address: a tensor that broadcasting would stretch must not get there."""
    graph = quantized("llama")
    weight = graph.weights[f"model.layers.0.mlp.up_proj.{suffix}"]
    weight.value = weight.value[:, :1].contiguous()
    with pytest.raises(VerifyError, match="linear_w4a8"):
        verify(graph)


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"activation_group_size": 0}])
def test_a_program_gives_the_same_bits(options: dict[str, object]) -> None:
    graph = quantized("qwen2", **options)
    (ids,) = random_ids([41])
    inputs = [dense_inputs([len(ids)], ids, graph.meta.kv_specs) for _ in range(2)]
    fast, plain = lower(graph, TARGET), lower(graph, TARGET, programs=False)
    called = {str(n.target) for n in fast.module.graph.nodes if n.op == "call_function"}
    assert not any("linear_w4a8" in name for name in called)
    assert torch.equal(fast(inputs[0]), plain(inputs[1]))

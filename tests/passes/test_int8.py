"""int8: which layers, how close, the same between kernels, and what stays on disk."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pydantic import ValidationError

from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.int8 import Int8, Int8Config
from optkit.passes.quantization.targets import matches
from optkit.passes.smoothquant import SmoothQuant, SmoothQuantConfig
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
from tests.support.isas import usable_isas
from tests.support.target import TARGET

HEAD = "the output head stays in float (lm_head: false)"
LISTED = "on the ignore list"


def quantized(name: str, **options: object) -> Graph:
    graph = captured(name)
    apply(graph, "int8", **options)
    return graph


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3", "mixtral"])
def test_close_to_float(name: str, group_size: int) -> None:
    graph = quantized(name, group_size=group_size)
    verify(graph)
    assert_origins_invert(graph)
    (ids,) = random_ids([24])
    error = relative_error(dense(graph, ids), dense(captured(name), ids))
    assert 1e-4 < error < 0.15


def test_groups_are_closer_than_channels() -> None:
    (ids,) = random_ids([24])
    expected = dense(captured("llama"), ids)
    coarse, fine = (relative_error(dense(quantized("llama", group_size=g), ids), expected) for g in (0, 32))
    assert fine < coarse


@pytest.mark.parametrize("group_size", [0, 32, 96])  # 96 is for down projections alone
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_kernels_agree_and_ragged_is_dense(name: str, group_size: int) -> None:
    """Between kernels a value may round to the next of 255 steps, so far less than quantizing itself."""
    graph = quantized(name, group_size=group_size)
    assert_kernels_agree(graph, captured(name), "linear_w8a8", 0.3)


def test_one_layer_is_the_same_in_every_kernel() -> None:
    assert_one_layer_agrees(quantized("llama"), reference.linear_w8a8)


def test_sites_and_skips_of_llama() -> None:
    _, plan = checked(captured("llama"), "int8")
    assert len(plan.sites) == 14
    assert [(skip.site, skip.reason) for skip in plan.skips] == [("lm_head", HEAD)]
    _, plan = checked(captured("llama"), "int8", lm_head=True)
    assert [site.name for site in plan.sites][-1] == "lm_head"
    assert not plan.skips


def test_weights_shrink_to_a_quarter() -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "int8")
    result = optimization.apply(graph, plan, PassContext(TARGET))
    products = 2 * (64 * 192 + 3 * 64 * 96)
    scales = 2 * 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    before, after = result.stats["weight_bytes_before"], result.stats["weight_bytes_after"]
    assert before - after == 3 * products - scales


def test_shared_inputs_are_quantized_once() -> None:
    graph = quantized("llama")
    assert len(list(graph.calls(reference.linear_w8a8))) == 14
    assert len(list(graph.calls(reference.quantize_per_token))) == 8


def test_fused_projections_keep_their_names_on_disk() -> None:
    plain, fused = captured("llama"), captured("llama")
    apply(plain, "int8")
    for name in ("fuse_qkv", "fuse_gate_up", "int8"):
        apply(fused, name)
    verify(fused)
    first, second = checkpoint(plain), checkpoint(fused)
    assert first.keys() == second.keys()
    assert all(torch.equal(second[key], value) for key, value in first.items())
    assert "model.layers.0.self_attn.k_proj.weight_scale" in first


def test_conv1d_is_refused_with_the_reason() -> None:
    _, plan = checked(captured("gpt2"), "int8")
    assert not plan.sites
    transposed = [skip for skip in plan.skips if "transposed" in skip.reason]
    assert len(transposed) == 8


def test_biases_are_kept() -> None:
    graph = quantized("qwen2")
    first = next(graph.calls(reference.linear_w8a8))
    assert str(first.args[4].target) == "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_tied_head_leaves_the_embedding_alone(name: str) -> None:
    graph = captured(name)
    embedding = graph.meta.input_embedding
    before = graph.weights[embedding].value.clone()
    plan = apply(graph, "int8", lm_head=True)
    assert "lm_head" in [site.name for site in plan.sites]
    verify(graph)
    assert torch.equal(graph.weights[embedding].value, before)
    origin = graph.weights["lm_head.weight"].origin
    assert origin is not None
    assert [(p.name, p.rows) for p in origin.parts] == [("lm_head.weight", 128)]
    tensors = checkpoint(graph)
    assert tensors[embedding].dtype == torch.float32
    assert tensors["lm_head.weight"].dtype == torch.int8
    assert tensors["lm_head.weight_scale"].shape == (128, 1)


@pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
@pytest.mark.parametrize("isa", usable_isas())
def test_the_range_is_reduced_where_the_cpu_gains(isa: str) -> None:
    native.set_isa(isa)
    chosen = quantized("llama", group_size=32, lm_head=True, weight_only=["lm_head"])
    asked = [
        quantized("llama", group_size=32, lm_head=True, weight_only=["lm_head"], reduce_range=on)
        for on in (False, True)
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    plain, reduced = (graph.weights[name].value for graph in asked)
    assert not torch.equal(plain, reduced)
    assert torch.equal(chosen.weights[name].value, reduced if isa == "avx2" else plain)
    heads = [graph.weights["lm_head.weight"].value for graph in (chosen, *asked)]
    assert all(
        torch.equal(heads[0], head) for head in heads
    )  # weight-only layers multiply 16-bit activations


@pytest.mark.skipif("avx2" not in usable_isas(), reason="no AVX2")
@pytest.mark.parametrize(
    ("asked", "of_layer", "exact"),
    [
        (None, {}, True),
        (True, {}, False),
        (None, {"reduce_range": True}, False),
        (True, {"reduce_range": None}, True),
    ],
)
def test_weights_of_eight_bits_keep_their_levels_unless_asked(
    asked: bool | None, of_layer: dict[str, object], exact: bool
) -> None:
    """As of a Q8_0 file: groups of 32 with a scale in float16, of which one code is 127."""
    native.set_isa("avx2")
    graph = captured("llama")
    held = graph.weights["model.layers.0.mlp.up_proj.weight"]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, held.value.shape, generator=generator).unflatten(1, (-1, 32))
    codes[..., 5] = 127
    levels = torch.rand(codes.shape[:2], generator=generator).to(torch.float16).float()
    held.value = (codes * levels[..., None]).flatten(1)
    overrides = {"up_proj": of_layer} if of_layer else {}
    apply(graph, "int8", group_size=32, reduce_range=asked, overrides=overrides)
    stored = graph.weights["model.layers.0.mlp.up_proj.weight"].value
    assert torch.equal(stored, codes.flatten(1).to(torch.int8)) == exact


def test_layers_can_keep_the_range() -> None:
    graph = quantized("llama", reduce_range=True, overrides={"down_proj": {"reduce_range": False}})
    plain = quantized("llama", reduce_range=False)
    same = {
        name: torch.equal(graph.weights[f"model.layers.0.mlp.{name}.weight"].value, weight.value)
        for name in ("up_proj", "down_proj")
        for weight in [plain.weights[f"model.layers.0.mlp.{name}.weight"]]
    }
    assert same == {"up_proj": False, "down_proj": True}


# -- what to ignore --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.0.mlp.up_proj", 1),
        ("up_proj", 2),
        ("mlp.up_proj", 2),
        ("proj", 0),
        ("_proj", 0),
        ("re:.*up_proj", 2),
        (r"re:model\.layers\.0\.", 7),
        ("re:up_proj", 0),
        ("re:.*", 14),
        ("model.layers.0", 0),
    ],
)
def test_ignore(pattern: str, count: int) -> None:
    _, plan = checked(captured("llama"), "int8", ignore=[pattern])
    ignored = [skip for skip in plan.skips if skip.reason == LISTED]
    assert (len(ignored), len(plan.sites)) == (count, 14 - count)


def test_ignoring_one_part_of_a_fused_layer_ignores_it() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    _, plan = checked(graph, "int8", ignore=["k_proj"])
    assert [skip.site for skip in plan.skips if skip.reason == LISTED] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.self_attn.qkv_proj",
    ]


def test_the_fused_name_can_be_ignored_too() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    _, plan = checked(graph, "int8", ignore=["model.layers.1.self_attn.qkv_proj"])
    assert [s.site for s in plan.skips if s.reason == LISTED] == ["model.layers.1.self_attn.qkv_proj"]


def test_ignored_layers_keep_their_weights() -> None:
    graph = quantized("llama", ignore=["down_proj"])
    assert graph.weights["model.layers.0.mlp.down_proj.weight"].value.dtype == torch.float32
    assert graph.weights["model.layers.0.mlp.up_proj.weight"].value.dtype == torch.int8


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("head", "lm_head", False),
        ("q_proj", "a.q_proj", True),
        ("re:a", "ab", True),
        ("re:b", "ab", False),
        ("re:a$", "ab", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


# -- groups, targets, options ----------------------------------------------------------------------------


def test_a_group_that_does_not_divide() -> None:
    _, plan = checked(captured("llama"), "int8", group_size=64)
    down = "its 96 input channels are not a multiple of the group size 64"
    assert {skip.site for skip in plan.skips if skip.reason == down} == {
        f"model.layers.{i}.mlp.down_proj" for i in (0, 1)
    }
    assert len(plan.sites) == 12


def test_no_kernel_for_the_target() -> None:
    other = dataclasses.replace(DATASHEETS["cuda-h100"], kind="other")  # type: ignore[arg-type]
    plan = Int8(Int8Config()).check(captured("llama"), PassContext(other))
    assert not plan.sites
    assert HEAD in reasons(plan)
    assert any("no int8 kernel on cuda-h100" in reason for reason in reasons(plan))


def test_a_cpu_without_int8_units_can_still_take_the_portable_kernel_or_says_why() -> None:
    bare = dataclasses.replace(TARGET, isa=())
    plan = Int8(Int8Config(group_size=32)).check(captured("llama"), PassContext(bare))
    assert plan.sites or any("no int8 kernel with groups of 32" in reason for reason in reasons(plan))


@pytest.mark.parametrize("options", [{"group_size": 16}, {"bits": 4}, {"ignore": "lm_head"}])
def test_options_are_closed(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Int8Config(**options)


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("fused", [False, True])
def test_every_layer_weight_only(group_size: int, fused: bool) -> None:
    graph = captured("llama")
    if fused:
        apply(graph, "fuse_qkv")
        apply(graph, "fuse_gate_up")
    layers = len(list(graph.calls(reference.linear))) - 1
    (ids,) = random_ids([24])
    expected, before = dense(graph, ids), graph.num_bytes()
    plan = apply(graph, "int8", weight_only=["re:.*"], group_size=group_size)
    assert len(plan.sites) == layers == len(list(graph.calls(reference.linear_w8a16)))
    assert not list(graph.calls(reference.linear_w8a8))
    assert before - graph.num_bytes() > 0.6 * sum(
        4 * w.value.nbytes for w in graph.weights.values() if w.value.dtype == torch.int8
    )
    assert relative_error(dense(graph, ids, TARGET), expected) < 0.02


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        Int8Config(weight_only=["re:("])


@pytest.mark.parametrize("amx", [False, True])
def test_auto_activations_are_those_of_the_cpu(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: amx)
    _, smooth = checked(captured("llama"), "smoothquant", activations="auto")
    assert bool(smooth.sites) == (not amx)
    graph = captured("llama")
    plan = apply(graph, "int8", activations="auto")
    nodes = list(graph.calls(reference.linear_w8a16 if amx else reference.linear_w8a8))
    assert len(nodes) == len(plan.sites) > 0
    assert {node.kwargs.get("precision") for node in nodes} == {"bfloat16" if amx else None}
    if amx:  # closer than int8 activations: weights alone are rounded to int8
        (ids,) = random_ids([24])
        errors = [
            relative_error(dense(each, ids), dense(captured("llama"), ids))
            for each in (graph, quantized("llama"))
        ]
        assert errors[0] < errors[1]


def test_auto_activations_on_a_gpu_do_not_depend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    gpu = PassContext(DATASHEETS["cuda-h100"])
    assert SmoothQuant(SmoothQuantConfig(activations="auto")).check(captured("llama"), gpu).sites
    optimization = Int8(Int8Config(activations="auto"))
    optimization.check(captured("llama"), gpu)
    assert not optimization.in_bfloat16


def test_experts_keep_int8_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    graph = captured("mixtral")
    experts = len(list(graph.calls(reference.expert_linear)))
    apply(graph, "int8", activations="auto")
    verify(graph)
    assert len(list(graph.calls(reference.expert_w8a8))) == experts > 0
    assert all(node.kwargs["precision"] == "bfloat16" for node in graph.calls(reference.linear_w8a16))
    (ids,) = random_ids([24])
    assert relative_error(dense(graph, ids), dense(captured("mixtral"), ids)) < 0.15


def test_bfloat16_activations_skip_all_layers_of_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    options = {"activations": "bfloat16", "lm_head": True, "weight_only": ["lm_head"]}
    _, plan = checked(captured("llama"), "int8", **options)
    assert not plan.sites and reasons(plan) == {"bfloat16 activations are for CPUs with AMX"}

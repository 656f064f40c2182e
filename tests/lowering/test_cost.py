"""Predicted work against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.lowering.cost import DISPATCH_SECONDS, Cost, node_cost, predict_seconds
from tests.support.graphs import apply, captured, graph_cost
from tests.support.target import TARGET

HIDDEN, MLP, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 128, 4, 2, 16, 2
PREFILL, DECODE = Point(32, 1, 32), Point(3, 3, 100)


def costs(graph: Graph, op: object, point: Point) -> list[Cost]:
    values = infer_shapes(graph, point)
    return [node_cost(graph, node, values, point) for node in graph.calls(op)]


def test_a_linear() -> None:
    q_proj = costs(captured("llama"), reference.linear, PREFILL)[0]
    assert q_proj.flops == 2 * 32 * HIDDEN * HEADS * HEAD_DIM
    assert q_proj.weight_bytes == HIDDEN * HEADS * HEAD_DIM * 4
    assert (q_proj.int8_ops, q_proj.kv_bytes, q_proj.activation_bytes) == (0, 0, 0)


def test_a_bias_is_read_too() -> None:
    q_proj = costs(captured("qwen2"), reference.linear, PREFILL)[0]
    assert q_proj.weight_bytes == (HIDDEN * 64 + 64) * 4


def test_the_head_works_on_selected_rows_only() -> None:
    head = costs(captured("llama"), reference.linear, PREFILL)[-1]
    assert head.flops == 2 * 1 * HIDDEN * VOCABULARY


def test_attention_of_a_prefill() -> None:
    """Token t of n sees t + 1 keys; a multiply and an add, for scores and for values."""
    (first, _) = costs(captured("llama"), reference.attention, PREFILL)
    pairs = 32 * 33 / 2
    assert first.flops == 2 * pairs * HEADS * (HEAD_DIM + HEAD_DIM)
    assert first.kv_bytes == 32 * KV_HEADS * 2 * HEAD_DIM * 4


def test_attention_of_a_decode() -> None:
    """Each of three sequences sees its whole context; grouped queries share the keys they read."""
    (first, _) = costs(captured("llama"), reference.attention, DECODE)
    assert first.flops == 2 * 3 * 100 * HEADS * (HEAD_DIM + HEAD_DIM)
    assert first.kv_bytes == 3 * 100 * KV_HEADS * 2 * HEAD_DIM * 4


def test_an_int8_cache_is_read_in_its_own_bytes() -> None:
    """D numbers and four bytes of scale for each token, head, K and V; the arithmetic is the same."""
    graph = captured("llama")
    (before, _) = costs(graph, reference.attention, DECODE)
    graph.meta = graph.meta.with_kv_specs(replace(spec, dtype="int8") for spec in graph.meta.kv_specs)
    (after, _) = costs(graph, reference.attention, DECODE)
    assert after.kv_bytes == 3 * 100 * KV_HEADS * 2 * (HEAD_DIM + 4)
    assert after.flops == before.flops


def test_attention_over_an_int8_cache_works_on_the_int8_units() -> None:
    graph = captured("llama")
    apply(graph, "flash_attention")
    (before, _) = costs(graph, reference.attention, PREFILL)
    apply(graph, "kv_int8")
    (after, _) = costs(graph, reference.attention, PREFILL)
    assert (after.flops, after.int8_ops) == (0.0, 1.5 * before.flops)


def test_grouped_queries_read_less() -> None:
    grouped = costs(captured("llama"), reference.attention, DECODE)[0]
    full = costs(captured("llama", num_key_value_heads=HEADS), reference.attention, DECODE)[0]
    assert full.flops == grouped.flops
    assert full.kv_bytes == 2 * grouped.kv_bytes


def test_a_window_bounds_attention() -> None:
    """mistral with a window of 8: a decode at 100 sees 8 keys, and reads them and its own."""
    (first, _) = costs(captured("mistral"), reference.attention, DECODE)
    assert first.flops == 2 * 3 * 8 * HEADS * (HEAD_DIM + HEAD_DIM)
    assert first.kv_bytes == 3 * (8 + 1) * KV_HEADS * 2 * HEAD_DIM * 4
    (short, _) = costs(captured("mistral"), reference.attention, Point(1, 1, 4))
    assert short.flops == 2 * 4 * HEADS * (HEAD_DIM + HEAD_DIM)


def test_a_chunk_after_a_prefix() -> None:
    """8 new tokens that end at 40 see 33 .. 40 keys."""
    (first, _) = costs(captured("llama"), reference.attention, Point(8, 1, 40))
    assert first.flops == 2 * sum(range(33, 41)) * HEADS * (HEAD_DIM + HEAD_DIM)


def test_experts() -> None:
    """Two of four experts a token: both projections of both experts, and the distinct experts of 32 tokens."""
    first, second, *_ = costs(captured("mixtral"), reference.expert_linear, PREFILL)
    assert first.flops == 2 * (32 * 2) * HIDDEN * (2 * MLP)
    assert second.flops == 2 * (32 * 2) * MLP * HIDDEN
    weight = 4 * HIDDEN * 2 * MLP * 4
    assert first.weight_bytes == pytest.approx(weight * (1 - 0.5**32))
    (one, *_) = costs(captured("mixtral"), reference.expert_linear, Point(1, 1, 9))
    assert one.weight_bytes == weight / 2


def test_expected_experts_are_those_of_random_routings() -> None:
    """The formula against the mean over drawn routings: 2 of 4 experts for 3 tokens."""
    (cost, *_) = costs(captured("mixtral"), reference.expert_linear, Point(3, 3, 9))
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 3, 4, generator=generator).argsort(dim=2)[..., :2].flatten(1)
    distinct = torch.nn.functional.one_hot(draws, 4).amax(1).sum(1).double().mean()
    assert cost.weight_bytes / (4 * HIDDEN * 2 * MLP * 4) == pytest.approx(distinct.item() / 4, rel=0.02)


def test_int8_experts_read_a_token_in_the_bytes_of_its_experts() -> None:
    """J experts of N x K int8 weights and N x K / 32 scales of two bytes, of both projections."""
    graph = captured("mixtral")
    apply(graph, "int8", group_size=32)
    first, second, *_ = costs(graph, reference.expert_w8a8, Point(1, 1, 9))
    assert first.weight_bytes == 2 * (2 * MLP) * (HIDDEN + HIDDEN / 32 * 2)
    assert second.weight_bytes == 2 * HIDDEN * (MLP + MLP / 32 * 2)
    assert first.int8_ops == 2 * 2 * (2 * MLP) * HIDDEN and first.flops == 0


def test_a_whole_graph_is_the_sum() -> None:
    """Matrix products by hand; the rest of a tiny model is small beside them."""
    layer = HIDDEN * (HEADS + 2 * KV_HEADS + HEADS) * HEAD_DIM + 3 * HIDDEN * MLP
    products = 2 * 32 * LAYERS * layer + 2 * HIDDEN * VOCABULARY
    attention = LAYERS * 2 * (32 * 33 / 2) * HEADS * 2 * HEAD_DIM
    total = graph_cost(captured("llama"), PREFILL)
    assert products + attention < total.flops < 1.15 * (products + attention)
    assert total.weight_bytes >= 4 * (LAYERS * layer + HIDDEN * VOCABULARY)


def test_int8_moves_work_and_shrinks_weights() -> None:
    graph, quantized = captured("llama"), captured("llama")
    apply(quantized, "int8", lm_head=True)
    before, after = graph_cost(graph, PREFILL), graph_cost(quantized, PREFILL)
    products = sum(cost.flops for cost in costs(graph, reference.linear, PREFILL))
    assert before.int8_ops == 0
    assert after.int8_ops == products
    assert before.weight_bytes / 4 < after.weight_bytes < before.weight_bytes / 3
    assert after.kv_bytes == before.kv_bytes


@pytest.mark.parametrize(("symmetric", "bits"), [(True, 4.5), (False, 5.0)])
def test_int4_reads_its_bits_and_works_on_the_int8_units(symmetric: bool, bits: float) -> None:
    graph, quantized = captured("llama"), captured("llama")
    apply(quantized, "w4a8", symmetric=symmetric)
    (q_proj, *_) = costs(quantized, reference.linear_w4a8, DECODE)
    assert q_proj.weight_bytes == HIDDEN * HEADS * HEAD_DIM * bits / 8
    assert q_proj.int8_ops == costs(graph, reference.linear, DECODE)[0].flops
    assert q_proj.flops == 0


@pytest.mark.parametrize("point", [Point(512, 1, 512), Point(1, 1, 512)])
def test_int8_is_predicted_faster_where_products_dominate(point: Point) -> None:
    graph = captured("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    quantized = graph.clone()
    apply(quantized, "int8")
    assert predict_seconds(quantized, point, TARGET) < predict_seconds(graph, point, TARGET)


def test_fusing_is_predicted_to_save_dispatches() -> None:
    graph = captured("llama")
    fused = graph.clone()
    apply(fused, "fuse_qkv")
    apply(fused, "fuse_gate_up")
    saved = predict_seconds(graph, PREFILL, TARGET) - predict_seconds(fused, PREFILL, TARGET)
    ops_saved = LAYERS * (2 + 1)  # three products to one, two to one; slices are free
    assert saved == pytest.approx(ops_saved * DISPATCH_SECONDS["cpu"], rel=0.05)


def test_the_roofline_takes_the_longer_side() -> None:
    assert Cost(flops=1e11).seconds(TARGET) == 1.0
    assert Cost(flops=1e11, weight_bytes=3e10).seconds(TARGET) == 3.0
    assert Cost(flops=5e10, int8_ops=2e11, kv_bytes=1e9).seconds(TARGET) == 1.0
    assert Cost().seconds(TARGET) == 0.0


def test_labels() -> None:
    assert Point(512, 1, 512).label == "prefill 512"
    assert Point(4, 4, 513).label == "decode@513"


@pytest.mark.parametrize("amx", [False, True])
def test_bfloat16_activations_cost_what_the_cpu_does_with_them(
    amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    graph, quantized = captured("llama"), captured("llama")
    apply(quantized, "int8", activations="bfloat16")
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: amx)
    products = costs(graph, reference.linear, DECODE)[0].flops
    q_proj = costs(quantized, reference.linear_w8a16, DECODE)[0]
    assert (q_proj.half_flops, q_proj.int8_ops) == ((products, 0) if amx else (0, 2 * products))

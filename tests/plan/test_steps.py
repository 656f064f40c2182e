"""Predicted steps: work against torch's own counter on the model in transformers, and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from optkit.graph.shapes import Point
from optkit.lowering.cost import Cost, predict_seconds
from optkit.machine import float_products
from optkit.machine.target import DATASHEETS
from optkit.plan.shares import CPU, CPU_AVX2, FLOOR, Shares, Unit, shares_of
from optkit.plan.steps import StepModel, compute_seconds
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

TOKENS = 48


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_products_are_those_that_torch_counts_in_transformers(name: str) -> None:
    """Eager transformers computes every pair of attention, half of which the mask drops; the head sees one row."""
    model = tiny_model(name, attention="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.arange(TOKENS)[None], logits_to_keep=1)
    products = counter.get_flop_counts()["Global"]
    batched = sum(count for op, count in products.items() if "bmm" in str(op))
    linear = sum(products.values()) - batched
    step = StepModel(captured(name), TARGET, FLOOR)
    rows = sum(c.cost.flops * n for c, n in step.rows(TOKENS, 1).items() if c.unit is Unit.FLOAT)
    pairs = sum(c.cost.flops * n for c, n in step.by_sequence(1, Point(TOKENS, 1, TOKENS)).items())
    rotary = 2 * TOKENS * 8 if name != "gpt2" else 0  # angles as an outer product, which is no linear layer
    assert rows == pytest.approx(linear, abs=rotary * 4)
    kept = (TOKENS + 1) / 2 / TOKENS  # of all pairs
    assert pairs == pytest.approx((batched if name == "gpt2" else batched - rotary) * kept, rel=0.01)


def test_the_floor_is_the_roofline_of_the_cost_model() -> None:
    graph, target = captured("llama"), DATASHEETS["cuda-h100"]
    for point in (Point(64, 1, 64), Point(4, 4, 100)):
        found = StepModel(graph, target).at(point, 1 << 20)
        assert found.seconds == pytest.approx(predict_seconds(graph, point, target), rel=1e-9)


def test_a_chunked_prompt_is_the_sum_of_its_chunks() -> None:
    steps = StepModel(captured("llama"), TARGET)
    chunks = [
        steps.step((Point(16, 1, 16),)),
        steps.step((Point(16, 1, 32),)),
        steps.step((Point(8, 1, 40),)),
    ]
    assert steps.prefill(40, 16).seconds == pytest.approx(sum(one.seconds for one in chunks))
    assert steps.prefill(40, 16).seconds > steps.prefill(40, 64).seconds  # a chunk costs a step


def test_a_mixed_step_reads_the_weights_once() -> None:
    steps = StepModel(captured("llama"), TARGET)
    chunk, decode = (Point(16, 1, 16),), (Point(4, 4, 100),)
    mixed, apart = steps.step((*chunk, *decode)), [steps.step(chunk), steps.step(decode)]
    assert mixed.weight_bytes < sum(one.weight_bytes for one in apart) * 0.6
    assert mixed.kv_bytes == pytest.approx(sum(one.kv_bytes for one in apart))
    assert mixed.seconds < sum(one.seconds for one in apart)


def test_time_is_at_least_the_floor_and_falls_with_the_ceilings() -> None:
    graph = captured("llama")
    for point in (Point(64, 1, 64), Point(1, 1, 100)):
        slow = StepModel(graph, TARGET).at(point, 64)
        fast = StepModel(graph, replace(TARGET, fp32_flops=1e12, memory_bandwidth=1e11)).at(point, 64)
        assert slow.floor < slow.seconds and fast.seconds < slow.seconds
        assert sum(slow.parts.values()) == pytest.approx(slow.seconds)


@pytest.mark.parametrize(
    ("name", "options", "unit"),
    [
        ("int8", {"group_size": 32}, Unit.INT8),
        ("w4a8", {"group_size": 32}, Unit.INT4),
        ("rtn", {"scheme": "W4A16", "group_size": 32}, Unit.WEIGHT_ONLY),
    ],
)
def test_an_op_runs_on_the_unit_of_its_format(name: str, options: dict[str, object], unit: Unit) -> None:
    graph = captured("llama")
    apply(graph, name, **options)
    units = {op.unit for op in StepModel(graph, TARGET).rows(16, 1)}
    assert unit in units and not units & {Unit.FP8, Unit.HALF}


def test_captured_attention_has_a_share_of_its_own() -> None:
    graph = captured("llama")
    (before,) = {op.unit for op in StepModel(graph, TARGET).by_sequence(1, Point(1, 1, 9))}
    apply(graph, "flash_attention")
    (after,) = {op.unit for op in StepModel(graph, TARGET).by_sequence(1, Point(1, 1, 9))}
    assert (before, after) == (Unit.PLAIN_ATTENTION, Unit.ATTENTION)


def test_a_type_without_units_runs_as_float32() -> None:
    """A100 has no float8 units: the work is not free."""
    a100 = DATASHEETS["cuda-a100"]
    assert compute_seconds(Unit.FP8, Cost(int8_ops=1e12), a100) == pytest.approx(1e12 / a100.fp32_flops)
    assert compute_seconds(Unit.INT8, Cost(int8_ops=1e12), a100) == pytest.approx(1e12 / a100.int8_ops)


@pytest.mark.parametrize("shares", [CPU, CPU_AVX2])
def test_shares_are_shares(shares: Shares) -> None:
    parts = (*shares.compute.values(), *shares.bandwidth.values(), shares.reading, shares.other)
    assert all(0 < share <= 1 for share in parts)


@pytest.mark.parametrize(
    ("isa", "shares"),
    [
        (("avx", "avx2", "fma"), CPU_AVX2),
        (("avx", "avx2", "fma", "avx_vnni"), CPU),
        (("avx2", "avx512f", "avx512_vnni"), CPU),
        (("asimd", "asimddp"), CPU),
    ],
)
def test_shares_follow_the_instructions_of_a_cpu(
    isa: tuple[str, ...], shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float_products, "cpu_vendor", lambda: "GenuineIntel")
    assert shares_of(replace(TARGET, isa=isa)) is shares
    assert shares_of(DATASHEETS["cuda-h100"]) is FLOOR


@pytest.mark.skipif(not float_products.has_onednn(), reason="PyTorch without oneDNN")
def test_float_layers_by_onednn_read_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_products, "cpu_vendor", lambda: "AuthenticAMD")
    graph, target = captured("llama"), replace(TARGET, isa=("avx2", "avx512_vnni"))
    point = Point(4, 4, 9)
    assert (
        StepModel(graph, target).at(point, 64).seconds < StepModel(graph, target, CPU).at(point, 64).seconds
    )


def test_a_unit_that_works_in_turns_takes_the_sum_of_arithmetic_and_memory() -> None:
    """Against a count by hand: the tiny model's linear layers in float32, whose weights are packed for several rows."""
    graph = captured("llama")
    both = replace(FLOOR, in_turns=frozenset({Unit.FLOAT}), packing={Unit.FLOAT: 0.5})
    for tokens, packed in ((1, 0.0), (2, 0.5)):
        point = Point(tokens, tokens, 9)
        added = (
            StepModel(graph, TARGET, both).at(point, 64).seconds
            - StepModel(graph, TARGET, FLOOR).at(point, 64).seconds
        )
        linear = [
            (op.cost, n)
            for op, n in StepModel(graph, TARGET, FLOOR).rows(tokens, tokens).items()
            if op.unit is Unit.FLOAT
        ]
        bandwidth, rate = TARGET.memory_bandwidth, TARGET.fp32_flops
        moved = [(c.weight_bytes + c.activation_bytes + c.kv_bytes) / bandwidth for c, _ in linear]
        expected = sum(
            n * (min(c.flops / rate, m) + packed * c.weight_bytes / bandwidth)
            for (c, n), m in zip(linear, moved, strict=True)
        )
        assert added == pytest.approx(expected, rel=1e-9)

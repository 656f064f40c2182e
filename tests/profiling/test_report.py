"""Reports: costs by hand, rows that add up, and the order by lost time."""

from __future__ import annotations

import json

import pytest

from optkit.graph import ops
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels.cpu import native
from optkit.lowering.cost import node_cost
from optkit.profiling.observer import Work
from optkit.profiling.report import described, label, step_costs
from tests.support.recorded import PROMPT_TOKENS, tiny_recorded, tiny_report
from tests.support.target import TARGET
from tests.support.tiny_runtime import int8_graph

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@needs_native
def test_rows_add_up_to_the_median_step_most_lost_first() -> None:
    report = tiny_report()
    assert [phase.phase for phase in report.phases] == ["prefill", "decode"]
    for phase in report.phases:
        assert sum(row.seconds for row in phase.rows) == pytest.approx(phase.seconds, rel=1e-9)
        assert [row.lost for row in phase.rows] == sorted((row.lost for row in phase.rows), reverse=True)
        assert phase.seconds == sorted(phase.all_seconds)[len(phase.all_seconds) // 2]
        assert 0 < phase.roof < phase.seconds
    assert json.loads(json.dumps(report.to_dict()))["phases"]["decode"]["sequences"][0]["num_new"] == 1


@needs_native
def test_a_linear_layer_has_the_roof_of_its_weights_and_products() -> None:
    decode = tiny_report().phases[1]
    row = next(row for row in decode.rows if row.name == "layers.*.mlp.gate_up_proj")
    assert (row.op, row.count, row.bound) == ("linear_w8a8", 2, "memory")
    graph = int8_graph()
    weights = [w for name, w in graph.weights.items() if ".mlp.gate_up_proj." in name]
    num_bytes = sum(w.nbytes for w in weights)
    outputs, inputs = next(
        w.shape for name, w in graph.weights.items() if name.endswith("gate_up_proj.weight")
    )
    assert row.num_bytes == num_bytes and row.operations == 2 * 2 * outputs * inputs
    assert row.roof == pytest.approx(num_bytes / TARGET.memory_bandwidth)
    prefill = tiny_report().phases[0]
    row = next(row for row in prefill.rows if row.name == "layers.*.mlp.gate_up_proj")
    products = [
        2 * rows * outputs * inputs for rows in (PROMPT_TOKENS, 1)
    ]  # the last layer has the row of logits
    assert row.operations == sum(products)
    reading = num_bytes / 2 / TARGET.memory_bandwidth
    assert row.roof == pytest.approx(sum(max(each / TARGET.int8_ops, reading) for each in products))


@needs_native
def test_every_native_call_is_of_a_node_of_the_graph() -> None:
    nodes = {node.name for node in int8_graph().fx.nodes}
    called = {op.node for op in tiny_recorded().ops if op.kernel not in ("program", "torch")}
    assert called and called <= nodes


def test_attention_of_a_batch_is_the_sum_over_its_sequences() -> None:
    graph = int8_graph()
    work = [Work(1, 20), Work(1, 100)]
    costs = step_costs(graph, work)
    attention = next(node for node in graph.fx.nodes if ops.op_name(node.target) == "attention")
    point = Point(2, 2, 100)
    values = infer_shapes(graph, point)
    alone = [node_cost(graph, attention, values, Point(1, 1, each.context)) for each in work]
    assert costs[attention.name].kv_bytes == sum(cost.kv_bytes for cost in alone)
    assert costs[attention.name].kv_bytes < node_cost(graph, attention, values, point).kv_bytes
    assert costs[attention.name].flops == sum(cost.flops for cost in alone)


def test_names_of_ops_are_modules_or_ops() -> None:
    graph = int8_graph()
    found = {label(graph, node) for node in graph.fx.nodes if node.op == "call_function"}
    assert {"layers.0.mlp.down_proj", "layers.1.self_attn.qkv_proj", "attention", "rope", "lm_head"} <= found


@pytest.mark.parametrize(
    ("phase", "work", "words"),
    [
        ("prefill", [Work(512, 512)], "prefill of 512 tokens"),
        ("prefill", [Work(512, 1024)], "prefill of 512 tokens of 1 sequence up to 1024 tokens"),
        ("decode", [Work(1, 513)], "decode of 1 sequence at 513 tokens"),
        ("decode", [Work(1, 9), Work(1, 30)], "decode of 2 sequences at 9 to 30 tokens"),
    ],
)
def test_steps_in_words(phase: str, work: list[Work], words: str) -> None:
    assert described(phase, work) == words

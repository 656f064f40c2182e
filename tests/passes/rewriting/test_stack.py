"""Fusing layers that are quantized already: codes over codes, or a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.checkpoint.modules import modules
from optkit.checkpoint.tensors import same
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.graph.verify import verify
from optkit.kernels import reference
from tests.checkpoint.test_compressed_tensors_writer import written
from tests.support.architectures import tiny_model
from tests.support.graphs import (
    apply,
    assert_origins_invert,
    assert_same_logits,
    captured,
    checked,
    checkpoint,
    reasons,
)

QUANTIZED: list[tuple[str, dict[str, Any]]] = [
    ("rtn", {"scheme": "W4A16", "group_size": 32}),
    ("rtn", {"scheme": "W3A16", "group_size": 64, "uneven_groups": "ragged"}),
    ("rtn", {"scheme": "W4A16_ASYM", "group_size": 32}),
    ("rtn", {"scheme": "W4A8_ASYM", "group_size": 32}),
    ("int8", {}),
    ("int8", {"weight_only": ["re:.*"], "group_size": 32}),
    ("fp8", {"scheme": "FP8"}),
    ("fp8", {"scheme": "FP8_DYNAMIC"}),
]


def quantized(row: str, **options: Any) -> Graph:
    graph = captured("llama")
    apply(graph, row, **options)
    return graph


def ordered(graph: Graph, same: bool) -> None:
    """Give every packed layer an act-order, the same for all that read one input or one of its own."""
    for number, node in enumerate(graph.calls(reference.linear_wna16)):
        x, packed, scale, zero, _, *bias = node.args
        columns = graph.weights[str(packed.target)].value.shape[1] * 8
        generator = torch.Generator().manual_seed(columns if same else number)
        name = str(packed.target).replace("weight_packed", "weight_g_idx")
        value = (torch.randperm(columns, generator=generator) // 32).to(torch.int32)
        graph.weights[name] = Weight(value, Origin((Part(name, columns),)))
        node.args = (x, packed, scale, zero, graph.weight_node(name, node), *bias)


@pytest.mark.parametrize(("row", "options"), QUANTIZED)
def test_quantized_layers_fuse(row: str, options: dict[str, Any]) -> None:
    graph = quantized(row, **options)
    before, tensors = graph.clone(), checkpoint(graph)
    for fusion in ("fuse_qkv", "fuse_gate_up"):
        plan = apply(graph, fusion)
        assert len(plan.sites) == 2 and not plan.skips
    verify(graph)
    assert_same_logits(before, graph)
    assert_origins_invert(graph)
    after = checkpoint(graph)
    shared = {name for name in tensors if name.endswith("input_scale")}
    assert after.keys() | shared == tensors.keys()
    assert all(same(tensors[name], value) for name, value in after.items())
    assert {m.name for m in modules(graph)} == {m.name for m in modules(before)}


@pytest.mark.parametrize(("row", "options"), [QUANTIZED[2], QUANTIZED[4], QUANTIZED[6]])
def test_a_fused_quantized_graph_is_written_and_read(
    tmp_path: Path, row: str, options: dict[str, Any]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    graph = quantized(row, **options)
    for fusion in ("fuse_qkv", "fuse_gate_up"):
        apply(graph, fusion)
    again = written(graph, tmp_path / "source", tmp_path / "out").graph()  # compared as it is written
    expected = {module.name: module.float_weight() for module in modules(graph)}
    given = {module.name: module.float_weight() for module in modules(again)}
    assert expected.keys() == given.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


def test_one_act_order_is_shared_and_several_are_a_reason(tmp_path: Path) -> None:
    graph = quantized("rtn", scheme="W4A16", group_size=32)
    other = graph.clone()
    ordered(graph, same=True)
    before = graph.clone()
    assert len(apply(graph, "fuse_qkv").sites) == 2
    verify(graph)
    assert_same_logits(before, graph)
    tiny_model("llama").save_pretrained(tmp_path / "source")
    written(graph, tmp_path / "source", tmp_path / "out")
    ordered(other, same=False)
    _, plan = checked(other, "fuse_qkv")
    assert reasons(plan) == {"the projections differ in their weight_g_idx, which belongs to the input"}


def test_formats_that_differ_are_a_reason() -> None:
    graph = quantized("rtn", scheme="W4A16", group_size=32, targets=["q_proj", "gate_proj"])
    assert reasons(checked(graph, "fuse_qkv")[1]) == {"the projections are quantized in different ways"}
    apply(graph, "rtn", scheme="W4A16", group_size=64, targets=["up_proj"])
    assert reasons(checked(graph, "fuse_gate_up")[1]) == {"the projections are quantized in different ways"}


@pytest.mark.parametrize(("row", "options"), [QUANTIZED[0], QUANTIZED[3], QUANTIZED[4], QUANTIZED[6]])
def test_rows_of_quantized_layers_are_pruned(row: str, options: dict[str, Any]) -> None:
    graph = quantized(row, **options)
    before = graph.clone()
    (site,) = apply(graph, "select_logits_rows").sites
    assert sum(node.target is not reference.linear and "linear" in node.name for node in site.nodes) >= 4
    verify(graph)
    assert_same_logits(before, graph)

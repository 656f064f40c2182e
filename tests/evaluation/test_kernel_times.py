"""Times of kernels alone: which nodes share a time, what runs, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import fx

from optkit.evaluation import kernel_times
from optkit.evaluation.kernel_times import Extract, KernelTimes, Unmeasurable, kinds, read_times
from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference
from optkit.lowering.lower import lower
from tests.support.architectures import SPECIFIC
from tests.support.graphs import apply, captured
from tests.support.small_runs import recipe
from tests.support.target import TARGET

PREFILL, DECODE = Point(24, 1, 24), Point(2, 2, 41)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_times, "REPEATS", 1)


def kind_sizes(graph: Graph, point: Point) -> dict[str, list[int]]:
    """The numbers of nodes of each kind, by op."""
    found: dict[str, list[int]] = {}
    for kind, nodes in kinds(graph, infer_shapes(graph, point, 8)).items():
        found.setdefault(kind.partition(":")[0], []).append(len(nodes))
    return found


def test_nodes_of_equal_op_shapes_and_options_are_one_kind() -> None:
    sizes = kind_sizes(captured("llama"), PREFILL)  # two layers
    assert sizes["attention"] == [2]
    # q and o; k and v; gate and up; down; the head
    assert sorted(sizes["linear"]) == [1, 2, 4, 4, 4]
    assert "aten.reshape.default" not in sizes


def test_every_node_of_a_quantized_model_runs_alone() -> None:
    graph = captured("llama")
    for name in (
        "fuse_qkv",
        "fuse_gate_up",
        "fuse_add_rms_norm",
        "select_logits_rows",
        "int8",
        "flash_attention",
    ):
        apply(graph, name)
    for point in (PREFILL, DECODE):
        values = infer_shapes(graph, point, 8)
        for nodes in kinds(graph, values).values():
            part = Extract(graph, values, point).graph_of(nodes)
            copied = [n for n in part.fx.nodes if n.op == "call_function" and n.target is nodes[0].target]
            assert len(copied) >= len(nodes)
            lower(part, TARGET)


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_a_step_of_every_architecture_has_a_time(name: str) -> None:
    """Experts compute numbers on the host (the rows of all experts), and phi3 joins an empty part of each head."""
    times = KernelTimes(TARGET, recipe("passes: {}"))
    assert 0 < times.step_seconds(captured(name), DECODE) < 10


def test_a_part_computes_what_its_op_computes() -> None:
    """A norm of the constant rows behind each activation, by hand."""
    graph = captured("llama")
    values = infer_shapes(graph, PREFILL, 8)
    norm = next(iter(graph.calls(reference.rms_norm)))
    part = Extract(graph, values, PREFILL).graph_of([norm])
    inputs = {"input_ids": torch.zeros(24, dtype=torch.int64)}
    pools = {str(n.target): torch.zeros(1) for n in part.fx.find_nodes(op="placeholder")}
    (found,) = lower(part)(pools | inputs)  # type: ignore[misc]
    row = torch.full((64,), 0.01, dtype=torch.float64)
    weight = graph.weights["model.layers.0.input_layernorm.weight"].value.double()
    expected = row / torch.sqrt((row**2).mean() + 1e-6) * weight
    torch.testing.assert_close(found.double(), expected.expand(24, 64), rtol=1e-5, atol=1e-6)


def test_a_shape_without_rows_has_the_time_of_the_roofline() -> None:
    graph = captured("llama")
    values = dict(infer_shapes(graph, PREFILL, 8))
    node = next(iter(graph.calls(reference.rms_norm)))
    source = node.args[0]
    assert isinstance(source, fx.Node)
    values[source] = torch.empty(7, 64, device="meta")
    with pytest.raises(Unmeasurable):
        Extract(graph, values, PREFILL).graph_of([node])


def test_a_model_without_weights_is_measured_too() -> None:
    graph = captured("llama").clone()
    for weight in graph.weights.values():
        weight.value = weight.value.to("meta")
    seconds = KernelTimes(TARGET, recipe("passes: {}")).step_seconds(graph, PREFILL)
    assert 0 < seconds < 10


def test_times_are_kept_and_not_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, graph = recipe("passes: {}"), captured("llama")
    first = KernelTimes(TARGET, settings)
    seconds = [first.step_seconds(graph, point) for point in workload_points(settings)]
    assert read_times(first.file) == first.seconds != {}
    monkeypatch.setattr(KernelTimes, "measure", lambda *_: pytest.fail("measured again"))
    again = KernelTimes(TARGET, settings)
    assert [again.step_seconds(graph, point) for point in workload_points(settings)] == seconds


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "b"}', '{"a": null}', '{"a": [1]}'])
def test_a_damaged_file_of_times_counts_as_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    assert read_times(file) == {}


def test_impossible_times_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"good": 0.5, "negative": -1.0, "endless": float("inf"), "nan": float("nan")}))
    assert read_times(file) == {"good": 0.5}

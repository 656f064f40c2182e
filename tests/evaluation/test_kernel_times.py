"""Predictions from layers: the sum, what is measured and kept, and steps without a prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optkit.evaluation import kernel_times
from optkit.evaluation.kernel_times import KernelTimes, read_times
from optkit.evaluation.short_models import ATTENTION
from optkit.evaluation.speed import workload_points
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.compiled.plan import PLAN
from tests.support.architectures import SPECIFIC
from tests.support.graphs import apply, captured
from tests.support.small_runs import recipe
from tests.support.target import TARGET

PREFILL, DECODE = Point(24, 1, 24), Point(2, 2, 41)
ENDS, LAYER, SLOW_LAYER = 5.0, 2.0, 7.0


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_times, "REPEATS", 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with fixed times of layers; the list gets the number of attentions of each measured model."""
    measured: list[int] = []

    def measure(self: KernelTimes, models: Sequence[Graph], point: Point, cold: bool) -> list[float]:
        found = []
        for model in models:
            kernels = [node.meta.get("kernel") for node in model.calls(*ATTENTION)]
            measured.append(len(kernels))
            found.append(ENDS + sum(SLOW_LAYER if k == "reference" else LAYER for k in kernels[1:-1]))
        return found

    monkeypatch.setattr(KernelTimes, "measure", measure)
    return measured


def times() -> KernelTimes:
    return KernelTimes(TARGET, recipe("passes: {}"))


def test_the_prediction_is_head_tail_and_each_layer_by_its_class(machine: list[int]) -> None:
    graph = captured("llama", num_hidden_layers=9)
    for index in (3, 4):
        list(graph.calls(*ATTENTION))[index].meta["kernel"] = "reference"
    assert times().step_seconds(graph, PREFILL) == pytest.approx(ENDS + 5 * LAYER + 2 * SLOW_LAYER)
    assert sorted(machine) == [2, 2, 4, 6]  # without layers; two slow ones; four of the five others


def test_a_model_of_more_layers_is_predicted_from_some(machine: list[int]) -> None:
    graph = captured("llama", num_hidden_layers=4)
    assert times().step_seconds(graph, PREFILL, layers=30) == pytest.approx(ENDS + 30 * LAYER)


def test_weights_of_a_model_larger_than_the_cache_are_read_from_memory(
    machine: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, found = captured("llama", num_hidden_layers=4), times()
    monkeypatch.setattr(kernel_times, "last_level_cache_bytes", lambda: 2 * graph.num_bytes())
    found.step_seconds(graph, DECODE)
    assert not any("cold" in key for key in found.seconds)
    found.step_seconds(graph, DECODE, layers=30)  # the whole does not fit, though these layers do
    assert any("cold" in key for key in found.seconds)


def test_a_graph_that_cannot_be_cut_is_measured_whole(machine: list[int]) -> None:
    assert times().step_seconds(captured("llama"), PREFILL) == pytest.approx(ENDS)
    assert machine == [2]


def test_there_is_no_prediction_for_compiled_layers_and_for_layers_beyond_memory(machine: list[int]) -> None:
    graph = captured("llama", num_hidden_layers=4)
    small = KernelTimes(replace(TARGET, memory_bytes=1 << 16), recipe("passes: {}"))
    assert small.step_seconds(graph, PREFILL) is None
    assert small.step_seconds(captured("llama"), PREFILL) is None
    graph.annotations[PLAN] = {"regions": [["add"]]}
    assert times().step_seconds(graph, PREFILL) is None
    assert machine == []


@pytest.mark.parametrize("name", sorted(SPECIFIC))
def test_a_step_of_every_architecture_has_a_time(name: str) -> None:
    seconds = times().step_seconds(captured(name), DECODE)
    assert seconds is not None and 0 < seconds < 10


def test_a_quantized_model_without_weights_is_measured_too() -> None:
    graph = captured("llama", num_hidden_layers=4)
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "int8", "flash_attention", "kv_int8"):
        apply(graph, name)
    for weight in graph.weights.values():
        weight.value = weight.value.to("meta")
    for point in (PREFILL, DECODE):
        seconds = times().step_seconds(graph, point)
        assert seconds is not None and 0 < seconds < 10
    assert graph.is_meta and len(list(graph.calls(*ATTENTION))) == 4


def test_times_are_kept_and_not_measured_twice(machine: list[int]) -> None:
    graph, settings = captured("llama", num_hidden_layers=4), recipe("passes: {}")
    first = times()
    seconds = [first.step_seconds(graph, point) for point in workload_points(settings)]
    assert read_times(first.file) == first.seconds != {}
    count = len(machine)
    assert [times().step_seconds(graph, point) for point in workload_points(settings)] == seconds
    assert len(machine) == count


def test_the_shortest_time_counts_where_a_disturbed_graph_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disturbed first measurement does not last: the graph before a pass is measured again beside the new one."""
    slow = {"now": 4.0}
    monkeypatch.setattr(
        KernelTimes,
        "measure",
        lambda self, models, point, cold: [
            slow["now"] * (ENDS + LAYER * (len(list(m.calls(*ATTENTION))) - 2)) for m in models
        ],
    )
    before, after = captured("llama", num_hidden_layers=4), captured("llama", num_hidden_layers=4)
    apply(after, "fuse_qkv")
    found = times()
    assert found.pair(before, before, PREFILL) == [4 * (ENDS + 2 * LAYER)] * 2
    slow["now"] = 1.0
    assert found.pair(before, after, PREFILL, beside=True) == [ENDS + 2 * LAYER] * 2
    slow["now"] = 4.0
    assert (
        times().pair(before, after, PREFILL, beside=True) == [ENDS + 2 * LAYER] * 2
    )  # known: nothing is measured


def test_times_measured_beside_other_work_are_not_kept(machine: list[int]) -> None:
    found = KernelTimes(TARGET, recipe("passes: {}"), keep=False)
    assert found.step_seconds(captured("llama"), PREFILL) == ENDS
    assert read_times(found.file) == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": "b"}', '{"a": null}', '{"a": [1]}'])
def test_a_damaged_file_of_times_counts_as_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    assert read_times(file) == {}


def test_impossible_times_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"good": 0.5, "negative": -1.0, "endless": float("inf"), "nan": float("nan")}))
    assert read_times(file) == {"good": 0.5}

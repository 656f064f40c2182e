"""Corrections: exact at an anchor, between its neighbours elsewhere, and within the time that is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.evaluation.kernel_times import KernelTimes
from optkit.graph.shapes import Point
from optkit.machine.target import DATASHEETS
from optkit.plan import calibrate as module
from optkit.plan.calibrate import Anchor, Calibrated, anchor_points, calibrate, can_be_whole, interpolated
from optkit.plan.steps import StepModel
from optkit.recipe.load import load_recipe
from tests.support.graphs import captured
from tests.support.target import TARGET

FACTORS = st.dictionaries(st.integers(1, 4096), st.floats(0.1, 10), min_size=1, max_size=6)


@given(FACTORS, st.integers(1, 8192))
def test_a_factor_lies_between_those_of_its_neighbours(factors: dict[int, float], length: int) -> None:
    found = interpolated(factors, length)
    assert min(factors.values()) * 0.999 <= found <= max(factors.values()) * 1.001
    for known, factor in factors.items():
        assert interpolated(factors, known) == pytest.approx(factor)


def test_a_corrected_prediction_meets_the_measurement_at_each_anchor() -> None:
    model = StepModel(captured("llama"), TARGET)
    points = [Point(64, 1, 64), Point(200, 1, 200), Point(1, 1, 64), Point(4, 4, 64), Point(4, 4, 200)]
    plain = [model.at(point, 512) for point in points]
    anchors = [
        Anchor(point, found.seconds - found.engine, found.floor * 7)
        for point, found in zip(points, plain, strict=True)
    ]
    steps = Calibrated(model, anchors)
    for point, found in zip(points, plain, strict=True):
        assert steps.at(point, 512).seconds == pytest.approx(found.floor * 7 + found.engine)


class Clock:
    """Seconds that pass with each measurement."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cost", [1.0, 12.0, 40.0])
def test_a_calibration_keeps_its_time(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, measured = Clock(), []

    class Times:
        def __init__(self, target: object, recipe: object, keep: bool = True) -> None:
            self.target, self.recipe, self.keep = target, recipe, keep

        def fits(self, graph: object) -> bool:
            return False

        def known_whole(self, graph: object, point: Point) -> None:
            return None

        def step_seconds(self, graph: object, point: Point) -> float:
            if not self.keep:
                raise LookupError
            measured.append(point)
            clock.now += cost
            return 0.5

    monkeypatch.setattr(module, "KernelTimes", Times)
    monkeypatch.setattr(module, "KnownTimes", Times)
    graph, recipe = captured("llama"), load_recipe("ttft-cpu")
    model = StepModel(graph, TARGET)
    found = calibrate(graph, model, recipe, TARGET, measure=True, clock=clock)
    assert len(found.anchors) == len(measured) and measured
    assert (len(measured) - 1) * cost < module.SECONDS  # the last began in time
    assert calibrate(graph, model, recipe, TARGET, measure=False, clock=Clock()).anchors == []


def test_steps_of_the_whole_model_are_measured_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path))
    graph, recipe = captured("llama"), load_recipe("ttft-cpu")
    model, lines = StepModel(graph, TARGET), list[str]()
    found = calibrate(graph, model, recipe, TARGET, measure=True, seconds=20, progress=lines.append)
    assert [anchor.point for anchor in found.anchors] == anchor_points(graph, recipe)
    assert lines == [f"measuring {len(found.anchors)} steps of the whole model"]
    for anchor in found.anchors:
        step = found.at(anchor.point, 512)
        assert step.seconds - step.engine == pytest.approx(anchor.measured)
    later = calibrate(graph, model, recipe, TARGET, measure=False)
    assert [a.measured for a in later.anchors] == [a.measured for a in found.anchors]
    other = load_recipe("ttft-cpu", ["runtime.max_num_batched_tokens=64"])
    assert calibrate(graph, model, other, TARGET, measure=False).anchors == []


def test_steps_for_which_the_whole_model_has_no_time_are_measured_by_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path))
    graph, recipe = captured("llama"), load_recipe("ttft-cpu")
    points, lines = anchor_points(graph, recipe), list[str]()
    monkeypatch.setattr(module.whole_model, "step_seconds", lambda *given, **options: {points[0]: 1.25})
    model = StepModel(graph, TARGET)
    found = calibrate(graph, model, recipe, TARGET, measure=True, seconds=20, progress=lines.append)
    assert [anchor.point for anchor in found.anchors] == points and found.anchors[0].measured == 1.25
    assert [line for line in lines if "layers" in line] == [
        f"measuring layers, {point.label} of {point.sequences}" for point in points[1:]
    ]


def test_a_large_model_is_measured_by_layers() -> None:
    graph, recipe = captured("llama"), load_recipe("ttft-cpu")
    times = KernelTimes(TARGET, recipe, keep=False)
    assert can_be_whole(graph, times, 1.0, 30.0) and not can_be_whole(graph, times, 20.0, 30.0)
    small = KernelTimes(replace(TARGET, memory_bytes=graph.num_bytes()), recipe, keep=False)
    assert not can_be_whole(graph, small, 1.0, 30.0)


def test_another_machine_is_not_calibrated() -> None:
    graph, target = captured("llama"), DATASHEETS["cpu-graviton4"]
    assert (
        calibrate(graph, StepModel(graph, target), load_recipe("ttft-cpu"), target, measure=True).anchors
        == []
    )


def test_anchors_stay_within_the_model_and_the_recipe() -> None:
    points = anchor_points(captured("llama"), load_recipe("edge-cpu"))  # 256 tokens of context, 4 requests
    assert max(point.context for point in points) <= 256
    assert [(p.sequences, p.context) for p in points if p.is_decode] == [(1, 256), (4, 256)]
    one = load_recipe("edge-cpu", ["runtime.max_num_seqs=1"])
    assert [p.sequences for p in anchor_points(captured("llama"), one) if p.is_decode] == [1]

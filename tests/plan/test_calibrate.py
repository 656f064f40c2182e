"""Corrections: exact at an anchor, between its neighbours elsewhere, and within the time that is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.graph.shapes import Point
from optkit.machine.target import DATASHEETS
from optkit.plan import calibrate as module
from optkit.plan.calibrate import Anchor, Calibrated, anchor_points, calibrate, interpolated
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
    points = [Point(64, 1, 64), Point(200, 1, 200), Point(1, 1, 64), Point(4, 4, 64)]
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


@pytest.mark.parametrize(("cost", "most"), [(1.0, 5), (12.0, 3), (40.0, 1)])
def test_a_calibration_keeps_its_time(cost: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, measured = Clock(), []

    class Times:
        def __init__(self, *args: object, keep: bool = True) -> None:
            self.keep = keep

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
    assert len(found.anchors) == len(measured) <= most + 1 and measured
    assert calibrate(graph, model, recipe, TARGET, measure=False, clock=Clock()).anchors == []


def test_another_machine_is_not_calibrated() -> None:
    graph, target = captured("llama"), DATASHEETS["cpu-graviton4"]
    assert (
        calibrate(graph, StepModel(graph, target), load_recipe("ttft-cpu"), target, measure=True).anchors
        == []
    )


def test_anchors_stay_within_the_model_and_the_recipe() -> None:
    points = anchor_points(captured("llama"), load_recipe("edge-cpu"))  # 256 tokens of context, 4 requests
    assert max(point.context for point in points) <= 256
    assert [point.sequences for point in points if point.is_decode] == [1, 4]
    one = load_recipe("edge-cpu", ["runtime.max_num_seqs=1"])
    assert [p.sequences for p in anchor_points(captured("llama"), one) if p.is_decode] == [1]

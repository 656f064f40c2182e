"""Steps of a whole model: rounds, repeats, and the time that is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from optkit.graph.shapes import Point
from optkit.plan import whole_model
from optkit.plan.whole_model import repeats, step_seconds, typical_mean
from optkit.recipe.load import load_recipe
from tests.support.graphs import captured
from tests.support.target import TARGET

POINTS = [Point(64, 1, 64), Point(1, 1, 64), Point(4, 4, 64)]
RECIPE = load_recipe("ttft-cpu")


def test_all_points_of_a_model_are_measured() -> None:
    found = step_seconds(captured("llama"), POINTS, TARGET, RECIPE, left=lambda: math.inf)
    assert list(found) == POINTS and all(0 < seconds < 5 for seconds in found.values())


@pytest.mark.parametrize(("enough_for", "number"), [(0, 0), (1, 1), (2, 2)])
def test_the_first_points_are_measured_where_time_is_short(enough_for: int, number: int) -> None:
    asked = itertools.count()
    found = step_seconds(
        captured("llama"), POINTS, TARGET, RECIPE, left=lambda: 100.0 if next(asked) < enough_for else 0.0
    )
    assert list(found) == POINTS[:number]


def test_other_work_can_be_measured_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def timed(step: Callable[[], None], count: int) -> float:
        order.append("step")
        return 1.0

    monkeypatch.setattr(whole_model, "timed", timed)
    step_seconds(
        captured("llama"),
        POINTS[:1],
        TARGET,
        RECIPE,
        left=lambda: math.inf,
        between=lambda: order.append("between"),
    )
    assert order == ["step", "step", *["between", "step"] * (whole_model.SAMPLES - 1)]


def test_steps_get_equal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 3 seconds is measured less often than those of 0.3, all along, and time is the end."""
    now, seconds, order = [0.0], iter([3.0, 0.3, 0.3]), list[float]()
    lasting: dict[int, float] = {}

    def timed(step: Callable[[], None], count: int) -> float:
        if id(step) not in lasting:
            lasting[id(step)] = next(seconds)
        now[0] += count * lasting[id(step)]
        order.append(lasting[id(step)])
        return lasting[id(step)]

    monkeypatch.setattr(whole_model, "timed", timed)
    found = step_seconds(captured("llama"), POINTS, TARGET, RECIPE, left=lambda: 30.0 - now[0])
    assert list(found.values()) == [3.0, 0.3, 0.3]
    long = [place for place, taken in enumerate(order) if taken == 3.0]
    assert 3 <= len(long) <= 5 and 35 <= len(order) - len(long) <= 70
    assert long[-1] > len(order) / 2 and now[0] <= 30.0


def test_a_stall_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall in one round, however long, is no part of the time; a step that is short is repeated."""
    rounds, counts = itertools.count(), list[int]()

    def timed(step: Callable[[], None], count: int) -> float:
        counts.append(count)
        return 60.0 if next(rounds) == 5 else 0.01

    monkeypatch.setattr(whole_model, "timed", timed)
    found = step_seconds(captured("llama"), POINTS[:1], TARGET, RECIPE, left=lambda: math.inf)
    assert found == {POINTS[0]: 0.01} and counts[-1] == repeats(0.01) == 5


def test_slower_rounds_count_and_outliers_do_not() -> None:
    assert typical_mean([1.0, 1.0, 1.0, 1.6]) == pytest.approx(1.15)
    assert typical_mean([1.0, 1.0, 1.0, 9.0]) == typical_mean([1.0]) == 1.0


def test_steps_of_a_second_are_not_repeated() -> None:
    assert repeats(1.0) == repeats(60.0) == 1 and repeats(0.001) == repeats(0.0) == whole_model.MOST_REPEATS

"""Paired measurements of speed: the order of rounds, the statistics, the measured steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from optkit.errors import UserError
from optkit.evaluation import speed
from optkit.evaluation.speed import (
    StepTime,
    check_workload,
    interleaved,
    measure_pair,
    step_function,
    workload_points,
)
from optkit.graph.shapes import Point
from optkit.lowering.lower import lower
from optkit.recipe.load import parse_recipe
from tests.support.graphs import captured


def test_timing_of_gives_median_and_quartiles_as_numpy() -> None:
    samples = [5.0, 1.0, 4.0, 2.0]
    q1, median, q3 = np.percentile(samples, (25, 50, 75))
    assert StepTime.of(samples) == StepTime(median=median, q1=q1, q3=q3)


def test_workload_points_are_a_prefill_for_each_length_and_a_decode_behind_the_longest() -> None:
    text = "schema_version: 1\nname: a\npasses: {}\nworkload: {prompt_tokens: [100, 7], batch: 3}\n"
    assert workload_points(parse_recipe(text)) == [Point(100, 1, 100), Point(7, 1, 7), Point(3, 3, 101)]


def test_a_workload_beyond_the_context_of_the_model_is_refused() -> None:
    recipe = parse_recipe("schema_version: 1\nname: a\npasses: {}\nworkload: {prompt_tokens: [100, 7]}\n")
    check_workload(recipe, 101)
    with pytest.raises(UserError, match=r"workload\.prompt_tokens: .* 100 tokens .* is 100 .* at most 99"):
        check_workload(recipe, 100)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of a clock that only ``steps`` advance."""
    time = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: time[0])
    return time


def steps(now: list[float], order: list[str], seconds: dict[str, float]) -> list[Callable[[], None]]:
    """Functions that add their name to ``order`` and their seconds to the clock."""

    def step(name: str) -> None:
        order.append(name)
        now[0] += seconds[name]

    return [partial(step, name) for name in seconds]


def test_interleaved_alternates_and_gives_seconds_of_each_step(now: list[float]) -> None:
    order: list[str] = []
    found = interleaved(steps(now, order, {"a": 0.3, "b": 3.0}), rounds=3)
    assert (
        order == ["a", "a", "b"] + ["a", "b"] * 3
    )  # warm-ups, and a trial of the shorter step; then the rounds
    assert found == [pytest.approx([0.3] * 3), pytest.approx([3.0] * 3)]


def test_interleaved_repeats_short_steps(now: list[float]) -> None:
    order: list[str] = []
    (found,) = interleaved(steps(now, order, {"a": 0.01}), rounds=2)
    assert len(order) == 2 + 2 * 20  # 0.4 s in two rounds
    assert found == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_steps_of_models_with_recurrent_states_run(name: str) -> None:
    """Each sequence has a state of its own, in a runner for one point and in one for all points."""
    text = "schema_version: 1\nname: a\npasses: {}\nworkload: {prompt_tokens: [20], batch: 3}\n"
    recipe, model = parse_recipe(text), lower(captured(name))
    for point in workload_points(recipe):
        step_function(model, point, recipe)()
    times = measure_pair(model, model, recipe, lambda times: True).before
    assert set(times) == {point.label for point in workload_points(recipe)}

"""The objective: costs against arithmetic by hand, and the verdict against simulated rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.evaluation.speed import PairedTimes, workload_points
from optkit.pipeline import objective
from optkit.pipeline.objective import Change
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Recipe

SECONDS = {"prefill 100": 0.1, "prefill 400": 0.4, "decode@401": 0.01}


def recipe(name: str, more: str = "") -> Recipe:
    workload = f"{{prompt_tokens: [100, 400], output_tokens: 11, batch: 4{more}}}"
    return parse_recipe(
        f"schema_version: 1\nname: a\nobjective: {name}\nworkload: {workload}\npasses: {{}}\n"
    )


def cost(name: str, more: str = "") -> float:
    chosen = recipe(name, more)
    return objective.TIMES[chosen.objective](chosen.workload, SECONDS)


@pytest.mark.parametrize(
    "name, seconds",
    [
        ("ttft", math.sqrt(0.1 * 0.4)),
        ("tpot", 0.01),
        ("request", math.sqrt((0.1 + 10 * 0.01) * (0.4 + 10 * 0.01))),
        ("throughput", (4 * 0.25 + 10 * 0.01) / 44),
    ],
)
def test_a_cost_is_that_of_the_workload(name: str, seconds: float) -> None:
    assert cost(name) == pytest.approx(seconds)


def test_lengths_of_the_histogram_count_for_the_nearest_measured_length() -> None:
    found = cost("ttft", ", histogram: [[90, 2], [120, 1], [3000, 1]]")
    assert found == pytest.approx(0.1**0.75 * 0.4**0.25)


def test_memory_counts_weights_and_the_cache_of_all_requests() -> None:
    change = objective.memory_change(recipe("memory"), [1000, 500], [10, 10])
    cache = 4 * (400 + 11) * 10
    assert change.ratio == pytest.approx((500 + cache) / (1000 + cache))
    assert not change.worse
    assert objective.memory_change(recipe("memory"), [1000, 2000], [10, 10]).worse


def test_every_objective_of_the_schema_has_a_cost() -> None:
    for name in ("ttft", "tpot", "request", "throughput", "memory"):
        chosen, times = recipe(name), PairedTimes()
        for point in workload_points(chosen):
            times.add(point.label, 2.0, 1.0)
        change = objective.change(chosen, times, [200, 100], [2, 1])
        assert change.ratio == pytest.approx(0.5)


def rounds(ratio: float, spread: float, seed: int, count: int = 3) -> Change:
    """The change of ``count`` simulated rounds with normal noise of ``spread`` in the logarithm of both sides."""
    random = np.random.default_rng(seed)
    before, after = np.exp(random.normal(0, spread, (2, count)))
    return Change.of([(float(b), float(a) * ratio) for b, a in zip(before, after, strict=True)])


@given(st.floats(0.2, 5), st.floats(0.001, 0.1), st.integers(0, 10**6))
def test_an_interval_holds_its_estimate_and_turns_with_the_sides(
    ratio: float, spread: float, seed: int
) -> None:
    change = rounds(ratio, spread, seed)
    assert change.low <= change.ratio <= change.high
    turned = Change.of([(1.0, 1 / change.ratio)])
    assert turned.ratio == pytest.approx(1 / change.ratio)


def share(verdict: Callable[[Change], bool], ratio: float, spread: float, count: int) -> float:
    return float(np.mean([verdict(rounds(ratio, spread, seed, count)) for seed in range(2000)]))


def test_the_interval_covers_the_true_ratio_in_95_of_100_cases() -> None:
    for count in (2, 3, 6):
        covered = share(lambda c: c.low <= 1.3 <= c.high, 1.3, 0.03, count)
        assert covered == pytest.approx(0.95, abs=0.015)


def test_an_equal_pass_is_rarely_called_worse_and_a_slow_pass_mostly() -> None:
    assert share(lambda c: c.worse, 1.0, 0.02, 3) < 0.02
    assert share(lambda c: c.worse, 1.2, 0.01, 3) > 0.95


def test_a_loss_that_is_not_a_number_is_worse() -> None:
    assert Change(math.nan, math.nan, math.nan).worse


def test_rounds_are_enough_once_the_verdict_is_certain() -> None:
    chosen, times = recipe("tpot"), PairedTimes()
    for after in (1.0, 1.3, 0.9):
        for point in workload_points(chosen):
            times.add(point.label, 1.0, after)
    assert not objective.enough(chosen, times)
    steady = PairedTimes()
    for after in (0.80, 0.81, 0.79):
        for point in workload_points(chosen):
            steady.add(point.label, 1.0, after)
    assert objective.enough(chosen, steady)
    assert objective.enough(recipe("memory"), times)

"""When a measurement of quality may stop: quantiles, looks, and the rate of wrong decisions on simulated text."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.evaluation.early_stop import (
    LOOK,
    SKEW_MARGIN,
    STATED_ERROR,
    BoundedMean,
    is_decided,
    looks,
    student_cdf,
    student_quantile,
)

WINDOWS, TRIALS = 40, 4000
Text = Callable[[np.random.Generator], np.ndarray]  # makes the means of all windows, around 1


def mean_of(values: np.ndarray, bound: float = 1.0, margin: float = 0.0) -> BoundedMean:
    stderr = float(values.std(ddof=1) / math.sqrt(len(values)))
    return BoundedMean(float(values.mean()), stderr, bound, margin=margin)


def measure(values: np.ndarray, bound: float = 1.0, margin: float = 0.0) -> tuple[int, bool | None]:
    """The windows measured, and the decision where they are fewer than all: True for within."""
    for measured in looks(len(values)):
        mean = mean_of(values[:measured], bound, margin)
        if is_decided([mean], measured, len(values)):
            return measured, mean.room > 0
    return len(values), None


# -- quantiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),  # NIST/SEMATECH e-Handbook, 1.3.6.7.2
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 7, 2.365),
        (0.99, 8, 2.896),
        (0.995, 15, 2.947),
        (0.999, 31, 3.375),
    ],
)
def test_quantiles_are_those_of_the_handbook(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=1e-3)


@given(st.floats(0.5, 0.9999), st.integers(1, 200))
def test_a_quantile_has_its_probability(probability: float, degrees: int) -> None:
    assert student_cdf(student_quantile(probability, degrees), degrees) == pytest.approx(
        probability, abs=1e-9
    )


# -- looks -----------------------------------------------------------------------------------------------------


def test_looks_are_fixed_and_before_the_end() -> None:
    assert list(looks(40)) == [8, 16, 24, 32]
    assert list(looks(LOOK)) == list(looks(2)) == []


def test_nothing_is_decided_between_looks_at_the_end_and_without_bounds() -> None:
    clear = [BoundedMean(0.001, 1e-6, 0.01)]
    assert [k for k in range(1, 41) if is_decided(clear, k, 40)] == [8, 16, 24, 32]
    assert not is_decided([], 8, 40)


def test_within_needs_every_mean_and_outside_only_one() -> None:
    within, outside = BoundedMean(0.98, 0.001, 0.97, True), BoundedMean(0.02, 0.001, 0.01)
    near = BoundedMean(0.0099, 0.001, 0.01)
    assert is_decided([within], 8, 40) and is_decided([outside], 8, 40)
    assert not is_decided([near], 8, 40) and not is_decided([within, near], 8, 40)
    assert is_decided([within, near, outside], 8, 40)


def test_no_number_decides_nothing() -> None:
    assert not is_decided([BoundedMean(math.nan, math.nan, 0.01)], 8, 40)


def test_a_margin_is_wanted_on_both_sides() -> None:
    assert is_decided([BoundedMean(0.0095, 1e-5, 0.01)], 8, 40)
    assert not is_decided([BoundedMean(0.0095, 1e-5, 0.01, margin=0.001)], 8, 40)
    assert not is_decided([BoundedMean(0.0105, 1e-5, 0.01, margin=0.001)], 8, 40)
    assert is_decided([BoundedMean(0.012, 1e-5, 0.01, margin=0.001)], 8, 40)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(0.5, 2))
def test_the_same_text_gives_the_same_end(seed: int, bound: float) -> None:
    values = np.random.default_rng(seed).lognormal(0, 0.3, WINDOWS)
    assert measure(values, bound) == measure(values.copy(), bound)


# -- wrong decisions -------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(1, 0.16, WINDOWS)


def disagreement(rng: np.random.Generator) -> np.ndarray:
    """Shares of 511 tokens, 3 % in the mean; the share of a window varies with its topic."""
    return rng.binomial(511, rng.gamma(40, 0.03 / 40, WINDOWS)) / 511 / 0.03


def divergence(rng: np.random.Generator) -> np.ndarray:
    """Mean divergences of windows, with four times the spread of those measured."""
    return rng.lognormal(-(0.6**2) / 2, 0.6, WINDOWS)


NOISE = 3 * math.sqrt(STATED_ERROR / TRIALS)


@pytest.mark.parametrize(("text", "margin"), [(normal, 0.0), (disagreement, 0.0), (divergence, SKEW_MARGIN)])
def test_a_mean_at_its_bound_is_rarely_decided_either_way(text: Text, margin: float) -> None:
    """A mean at its bound is the hardest: each side errs by no more than stated, whatever the look."""
    rng = np.random.default_rng(7)
    ends = [measure(text(rng), margin=margin)[1] for _ in range(TRIALS)]
    assert ends.count(True) / TRIALS <= STATED_ERROR
    assert ends.count(False) / TRIALS <= STATED_ERROR


def test_several_bounds_err_no_more_than_one() -> None:
    """Three means at their bounds, none outside in truth: "outside" is one error of three chances."""
    rng = np.random.default_rng(8)
    wrong = 0
    for _ in range(TRIALS):
        columns = [normal(rng) for _ in range(3)]
        for measured in looks(WINDOWS):
            means = [mean_of(column[:measured]) for column in columns]
            if is_decided(means, measured, WINDOWS):
                wrong += any(mean.room < 0 for mean in means)
                break
    assert wrong / TRIALS <= STATED_ERROR


def test_looks_that_each_took_the_whole_error_would_err_more() -> None:
    """The reason for sharing it."""
    rng = np.random.default_rng(9)
    wrong = 0
    for _ in range(TRIALS):
        values = normal(rng)
        wrong += any(
            mean_of(values[:k]).within(student_quantile(1 - STATED_ERROR, k - 1)) for k in looks(WINDOWS)
        )
    assert wrong / TRIALS > STATED_ERROR + NOISE


def test_a_skewed_mean_without_a_margin_would_look_too_good() -> None:
    rng = np.random.default_rng(7)
    ends = [measure(divergence(rng))[1] for _ in range(TRIALS)]
    assert ends.count(True) / TRIALS > STATED_ERROR + NOISE


@pytest.mark.parametrize(("bound", "is_within"), [(2.0, True), (0.5, False)])
def test_a_clear_case_ends_at_the_first_look(bound: float, is_within: bool) -> None:
    rng = np.random.default_rng(10)
    ends = [measure(normal(rng), bound) for _ in range(200)]
    assert {decision for _, decision in ends} == {is_within}
    assert np.mean([measured == LOOK for measured, _ in ends]) > 0.95

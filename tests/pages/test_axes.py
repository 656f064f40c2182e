"""Axes: values keep their order, ticks are round, few and on the axis."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optkit.pages.axes import LOG_FROM, MOST_TICKS, axis_of

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20)
POSITIVE = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20)


@given(VALUES, st.booleans())
@example([5e-324], True)
@example([5e-324], False)
def test_a_linear_axis_holds_all_values_in_order(values: list[float], zero: bool) -> None:
    axis = axis_of("x", values, log=False, zero=zero)
    assert axis is not None and axis.low <= min(values) and max(values) <= axis.high
    places = [axis.share(value) for value in sorted(values)]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 1
    check_ticks(axis.ticks(), axis.low, axis.high)


@given(POSITIVE)
def test_a_logarithmic_axis_holds_all_values_in_order(values: list[float]) -> None:
    axis = axis_of("x", values, log=True)
    assert axis is not None and axis.low < min(values) and max(values) < axis.high
    places = [axis.share(value) for value in sorted(values)]
    assert places == sorted(places)
    check_ticks(axis.ticks(), axis.low, axis.high)


def check_ticks(ticks: list[float], low: float, high: float) -> None:
    slack = 0.002 * (abs(low) + abs(high))
    assert 1 <= len(ticks) <= MOST_TICKS + 1 and ticks == sorted(set(ticks))
    assert low - slack <= ticks[0] and ticks[-1] <= high + slack


def test_numbers_that_are_not_finite_take_no_part() -> None:
    axis = axis_of("x", [math.nan, 3.0, math.inf, -math.inf])
    assert axis is not None and axis.high < 4 and not axis.shows(math.nan)
    assert (
        axis_of("x", [math.nan]) is None
        and axis_of("x", []) is None
        and axis_of("x", [-1.0], log=True) is None
    )


@pytest.mark.parametrize(
    ("values", "log"), [([1.0, LOG_FROM + 1], True), ([1.0, 2.0], False), ([0.0, 99.0], False)]
)
def test_a_wide_range_of_positive_values_is_logarithmic(values: list[float], log: bool) -> None:
    axis = axis_of("x", values)
    assert axis is not None and axis.log is log

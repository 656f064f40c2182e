"""Arrival processes: rates, coefficients of variation, and the same arrivals at another rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.arrivals import arrivals, at_rate


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_of_a_gamma_process(burstiness: float) -> None:
    gaps = np.diff(arrivals(20_000, 8.0, burstiness, [3]))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.floats(0.1, 50), st.sampled_from([0.3, 1.0, 2.0]), st.integers(0, 9))
def test_another_rate_has_the_same_arrivals_stretched(rate: float, burstiness: float, seed: int) -> None:
    one = arrivals(20, 1.0, burstiness, [seed])
    other = arrivals(20, rate, burstiness, [seed])
    assert other[0] == 0 and other == pytest.approx([at / rate for at in one])


def test_a_closed_loop_has_no_arrival_times() -> None:
    assert arrivals(3, None, 1.0, [0]) == [0.0] * 3


def test_recorded_times_start_at_zero_and_take_a_rate() -> None:
    assert at_rate([5.0, 6.0, 9.0], None) == [0.0, 1.0, 4.0]
    stretched = at_rate([5.0, 6.0, 9.0], 4.0)
    assert stretched == pytest.approx([0.0, 0.125, 0.5])  # two gaps in half a second
    assert at_rate([5.0, 5.0], 4.0) == [0.0, 0.0]

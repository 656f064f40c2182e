"""Ticks as nanoseconds."""

from __future__ import annotations

import time

import numpy as np
import pytest

from optkit.profiling.clock import Instant, TickClock, now


def test_ticks_between_two_moments_are_interpolated() -> None:
    clock = TickClock(Instant(1000, 50_000), Instant(4000, 51_000))
    assert clock.nanoseconds(np.array([1000, 2500, 4000, 7000])).tolist() == [50_000, 50_500, 51_000, 52_000]
    large = 1 << 61  # differences stay exact to a nanosecond
    clock = TickClock(Instant(large, 10), Instant(large + 3_000_000, 1_000_010))
    assert clock.nanoseconds(np.array([large + 3])).tolist() == [11]


def test_a_clock_needs_two_moments() -> None:
    with pytest.raises(ValueError, match="later"):
        TickClock(Instant(5, 5), Instant(5, 9))


def test_a_moment_is_between_readings_around_it() -> None:
    before = time.perf_counter_ns()
    moment = now(time.perf_counter_ns)
    after = time.perf_counter_ns()
    assert before <= moment.nanoseconds <= after and abs(moment.ticks - moment.nanoseconds) < 1_000_000

"""The clock of native records beside Python's: ticks become nanoseconds of ``time.perf_counter_ns``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

READINGS = 32  # of both clocks; the tightest counts


class Instant(NamedTuple):
    """A moment on both clocks."""

    ticks: int
    nanoseconds: int


def now(read_ticks: Callable[[], int]) -> Instant:
    """This moment on both clocks, to a fraction of a microsecond."""
    best, found = None, Instant(0, 0)
    for _ in range(READINGS):
        before = time.perf_counter_ns()
        ticks = read_ticks()
        after = time.perf_counter_ns()
        if best is None or after - before < best:
            best, found = after - before, Instant(ticks, (before + after) // 2)
    return found


class TickClock:
    """Ticks as nanoseconds, by two moments on both clocks around all records."""

    def __init__(self, first: Instant, last: Instant) -> None:
        if last.ticks <= first.ticks or last.nanoseconds <= first.nanoseconds:
            raise ValueError("the second moment must be later than the first")
        self.first = first
        self.length = (last.nanoseconds - first.nanoseconds) / (last.ticks - first.ticks)  # ns of a tick

    def nanoseconds(self, ticks: np.ndarray) -> np.ndarray:
        """``ticks`` [n] int64 as nanoseconds of ``time.perf_counter_ns`` [n] int64."""
        return self.first.nanoseconds + np.rint((ticks - self.first.ticks) * self.length).astype(np.int64)

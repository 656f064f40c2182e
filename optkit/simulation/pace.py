"""The speed of a machine over time: some machines are slower than the mean for a second, and requests wait meanwhile.

A virtual core may share a physical core with another for a while. Steps of a prompt then take 1.6 times as long. The
mean of the step times has that in it, but the 95th percentile of TTFT needs the slow seconds themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from optkit.simulation.step_costs import StepCosts, StepShape

WINDOW = 0.1  # seconds of steps with one speed


@dataclass(frozen=True)
class Pace:
    """Times of steps over their mean, replayed from the start at the end of the record.

    Attributes:
        ends: seconds from the start to the end of each window, ascending.
        slowness: time over the mean time in each window.
    """

    ends: tuple[float, ...] = (1.0,)
    slowness: tuple[float, ...] = (1.0,)

    def at(self, now: float) -> float:
        """The time of a step at ``now``, in seconds, over its mean time."""
        return self.slowness[min(bisect_right(self.ends, now % self.ends[-1]), len(self.ends) - 1)]


STEADY = Pace()


def recorded(costs: StepCosts, steps: Sequence[tuple[StepShape, float]]) -> Pace:
    """The pace during ``steps`` of (shape, seconds), measured one after the other, with a mean of 1."""
    windows: list[tuple[float, float]] = []  # seconds, predicted seconds
    measured = predicted = 0.0
    for shape, seconds in steps:
        measured, predicted = measured + seconds, predicted + costs.seconds(shape)
        if measured >= WINDOW:
            windows.append((measured, predicted))
            measured = predicted = 0.0
    if len(windows) < 2 or min(predicted for _, predicted in windows) <= 0:
        return STEADY
    mean = sum(measured for measured, _ in windows) / sum(predicted for _, predicted in windows)
    ends, slowness, end = [], [], 0.0
    for measured, predicted in windows:
        end += measured
        ends.append(end)
        slowness.append(measured / predicted / mean)
    return Pace(tuple(ends), tuple(slowness))

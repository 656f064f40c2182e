"""The pace of a machine over time: some are slower for a second now and then, and requests wait meanwhile.

A virtual core may share a physical core with another for a while: a step of a prompt then takes 1.6 times as long.
Median times of steps leave such seconds out, and the 95th percentile of TTFT depends on them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optkit.simulation.step_costs import MeasuredStep, median_seconds

WINDOW = 0.1  # seconds with one speed
BREAK = 1.0  # seconds without a step that are no part of the record


@dataclass(frozen=True)
class Pace:
    """Times of steps over their median, by time; repeated after the end.

    Attributes:
        ends: seconds from the start to the end of each window, ascending.
        slowness: time over median time in each window.
    """

    ends: tuple[float, ...] = (1.0,)
    slowness: tuple[float, ...] = (1.0,)

    @property
    def mean(self) -> float:
        """Time over median time of much work."""
        lengths = np.diff((0.0, *self.ends))
        return float(lengths.sum() / (lengths / np.array(self.slowness)).sum())

    def end(self, start: float, seconds: float) -> float:
        """The end of a step of median time ``seconds`` that begins at ``start``, in seconds."""
        position = start % self.ends[-1]
        place = bisect_right(self.ends, position)
        now, length = start, self.ends[place] - position
        while seconds * self.slowness[place] > length:
            now, seconds = now + length, seconds - length / self.slowness[place]
            place = (place + 1) % len(self.ends)
            length = self.ends[place] - (self.ends[place - 1] if place else 0.0)
        return now + seconds * self.slowness[place]


STEADY = Pace()


def recorded(steps: Sequence[MeasuredStep]) -> Pace:
    """The pace during ``steps``, which follow each other; steady for less than two windows."""
    typical = median_seconds(steps)
    ends, slowness = [0.0], list[float]()
    begin = measured = usual = 0.0
    last = -math.inf
    for step in steps:
        if step.start - last > BREAK:
            begin, measured, usual = step.start, 0.0, 0.0
        last = step.end
        measured, usual = measured + step.seconds, usual + typical[step.shape]
        if step.end - begin >= WINDOW:
            ends.append(ends[-1] + step.end - begin)
            slowness.append(measured / usual)
            begin, measured, usual = step.end, 0.0, 0.0
    return Pace(tuple(ends[1:]), tuple(slowness)) if len(slowness) > 1 else STEADY

"""Axes of charts: the place of a value on a line of pixels, and round numbers as ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_TICKS = 6
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
SMALLEST = 1e-290  # width of a linear axis, over which a division gives normal floats
LOG_FROM = 30.0  # largest over smallest value: a linear axis would hide the small ones


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from ``low`` to ``high``; ``label`` has the unit."""

    label: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """The place of ``value``, 0 at ``low`` and 1 at ``high``; cut off outside."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def shows(self, value: float) -> bool:
        """True for a finite value, on a logarithmic axis a positive value."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[float]:
        """Round values on the axis, at most ``MOST_TICKS``."""
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def axis_of(
    label: str, values: Iterable[float], *, log: bool | None = None, zero: bool = True
) -> Axis | None:
    """An axis with room for all finite ``values``; None without any.

    Args:
        log: a logarithmic axis; None decides for a logarithm where values span more than ``LOG_FROM``.
        zero: begin a linear axis at 0.
    """
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    if log is None:
        log = len(positive) == len(finite) and bool(finite) and max(finite) > LOG_FROM * min(finite)
    finite = positive if log else finite
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if log:
        return Axis(label, low / 1.25, high * 1.25, log=True)
    low = min(0.0, low) if zero else low
    size = max(abs(low), abs(high))
    step = max((high - low or size or 1.0) * 0.05, 1e-9 * size, SMALLEST)  # wider than the rounding of floats
    return Axis(label, low if zero and low == 0 else low - step, high + step)


def linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in STEPS if step * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer over many powers; round numbers over a short range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    choices: Sequence[Sequence[float]] = (
        [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)],
        *([10.0**power for power in range(first, last + 1, skip)] for skip in (1, 2, 4, 8, 16)),
    )
    for values in choices:
        found = [value for value in values if low * 0.999 <= value <= high * 1.001]
        if len(found) <= MOST_TICKS:
            return found if len(found) > 1 else linear_ticks(low, high)
    return [low, high]

"""When a measurement of quality may stop before the end of the text: once no more text can change the decision.

Quality is judged by bounds on means over windows of text. After every ``LOOK`` windows the interval of each mean is
compared with the bound. The measurement stops where all intervals lie within the bounds, or an interval lies outside.

Each look is a chance to stop by accident, so the looks share the error (Bonferroni): with m looks before the end, each
may err with probability ``PLANNED_ERROR`` / m on a side. Windows are the units, since tokens of a window are not
independent; quantiles are Student's, since windows are few. "Within" needs every mean within: an error needs the error
of the mean outside. "Outside" needs a single mean outside, so the bounds share the error once more. Divergences of
windows are skewed, so few windows without a large divergence look too good: a mean divergence has to clear the bound by
``SKEW_MARGIN`` as well. ``docs/decisions/0080`` has simulations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

STATED_ERROR = 0.025  # of means at their bound are decided before the end of the text, on each side, at most
PLANNED_ERROR = 0.01  # for normal windows; the rest is for windows with a tail
SKEW_MARGIN = 0.1  # of the bound on a divergence
LOOK = 8  # windows from one look to the next: fewer say little about how windows differ


@dataclass(frozen=True)
class BoundedMean:
    """A mean over windows with standard error and bound: the most, or the least with ``is_least``.

    ``margin`` is the wanted distance to the bound beside the standard errors.
    """

    value: float
    stderr: float
    bound: float
    is_least: bool = False
    margin: float = 0.0

    def within(self, quantile: float) -> bool:
        """True where the mean is within the bound by ``quantile`` standard errors."""
        return self.room - self.margin > quantile * self.stderr

    def outside(self, quantile: float) -> bool:
        """True where the mean is outside the bound by ``quantile`` standard errors."""
        return -self.room - self.margin > quantile * self.stderr

    @property
    def room(self) -> float:
        """From the mean to the bound; negative outside."""
        return self.value - self.bound if self.is_least else self.bound - self.value


def looks(windows: int) -> range:
    """The numbers of windows before each look at a measurement of ``windows`` windows, without the end."""
    return range(LOOK, windows, LOOK)


def is_decided(means: Sequence[BoundedMean], measured: int, windows: int) -> bool:
    """True where ``means`` over the first ``measured`` of ``windows`` windows decide: all within, or any outside.

    Without means nothing is to be decided, and the whole text is measured.
    """
    planned = looks(windows)
    if measured not in planned or not means:
        return False
    error, degrees = PLANNED_ERROR / len(planned), measured - 1
    if all(mean.within(student_quantile(1 - error, degrees)) for mean in means):
        return True
    quantile = student_quantile(1 - error / len(means), degrees)
    return any(mean.outside(quantile) for mean in means)


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t for a ``probability`` of at least 0.5, by bisection."""
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return high


def student_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0 and whole ``degrees`` of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees % 2:
        inside = angle + math.sin(angle) * sum(terms(cosine, range(3, degrees, 2), cosine))
        return 0.5 + inside / math.pi
    return 0.5 + math.sin(angle) * sum(terms(1.0, range(2, degrees, 2), cosine)) / 2


def terms(first: float, steps: range, cosine: float) -> Iterable[float]:
    """The terms of both series; none for a single degree of freedom."""
    if steps.start == 3 and steps.stop < 3:
        return
    yield first
    for step in steps:
        first *= cosine**2 * (step - 1) / step
        yield first

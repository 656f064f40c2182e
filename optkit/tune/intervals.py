"""Intervals of few rounds: Student's, of paired log-ratios and of means.

A race decides after two rounds or more, and a budget is too short for the six that an interval without normality needs
(``optkit.bench.statistics``). A confirmation goes by exact order statistics of that module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

T_975 = (  # Student's t at 97.5 %, for 1 to 30 degrees of freedom
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Ratio:
    """A ratio with the 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_less(self) -> bool:
        """True where the interval lies below 1."""
        return self.high < 1

    @property
    def is_more(self) -> bool:
        """True where the interval lies above 1."""
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over / under, paired by round: geometric mean, and Student's interval of the log-ratios.

    A single pair has an interval from 0 to infinity. Infinite costs make an infinite ratio.

    Raises:
        ValueError: the sides have different numbers of rounds, or none.
    """
    if len(over) != len(under) or not over:
        raise ValueError("a paired ratio needs as many rounds of both sides, and at least one")
    if any(math.isinf(b) for b in under):
        return Ratio(1.0, 0.0, math.inf)
    if any(math.isinf(a) for a in over):
        return Ratio(math.inf, math.inf if len(over) > 2 else 0.0, math.inf)
    logs = np.log(over) - np.log(under)
    mean = float(logs.mean())
    if len(logs) == 1:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half = student(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def student(degrees: int) -> float:
    """Student's t at 97.5 %."""
    return T_975[min(degrees, len(T_975)) - 1]


def upper_mean(values: Sequence[float]) -> float:
    """The upper end of Student's 95 % interval of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) + student(len(values) - 1) * spread

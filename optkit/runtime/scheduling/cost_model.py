"""Cost model: predicted seconds of a step, learned from measured steps.

    seconds = a + b * tokens + c * rows + d * pairs

``tokens`` are computed in the step, ``rows`` of the tokens get logits, and ``pairs`` counts the (query, key) pairs of
attention. ``a`` is the cost of the smallest step, above all reading the weights once. A Kalman filter updates the
coefficients (Anderson and Moore, Optimal Filtering, ch. 3). The filter's model of the time between two steps: the
machine's speed drifts, all coefficients together, and each coefficient drifts a little alone. So a slower machine is
slower for all kinds of steps, and hours of decoding do not unlearn the cost of prefill.

Numerical safeguards:

- errors are *relative*: a decode of 10 ms counts as much as a prefill of a second;
- a step far longer than predicted (the process was frozen) counts as ``OUTLIER_SIGMA`` standard deviations off;
- no coefficient becomes negative, so a longer prompt is never predicted to be faster. A negative coefficient is set
  to zero and the remaining coefficients take over the share, by the covariance (Simon and Chia 2002);
- coefficients are kept in units of the prior, so that all numbers are of a size. The covariance is symmetric to the
  bit, no variance exceeds the prior's, and each step adds more variance than rounding can take away. So the
  covariance stays positive for all features, also for collinear features.

Four numbers are too few for numpy: the same arithmetic on lists takes a third of the time, of every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from optkit.runtime.types import ScheduledRequest

# seconds: a step, a token, a row of logits, a pair; a small model on a CPU
PRIOR = (5e-3, 5e-4, 5e-4, 5e-8)
PRIOR_SPREAD = 30.0  # standard deviation of the prior, in units of the prior
NOISE = 0.1  # relative, of one measurement
SPEED_DRIFT = 0.01  # relative, of the machine's speed from step to step
DRIFT = 0.002  # relative, of one coefficient
MIN_VARIANCE = 1e-12  # added in each step; rounding takes up to 1e-13
OUTLIER_SIGMA = 10.0  # standard deviations
MIN_SECONDS, MAX_SECONDS = 1e-6, 3600.0  # seconds of a step


@dataclass(frozen=True)
class StepWork:
    """Features that decide the time of a step."""

    tokens: int = 0
    rows: int = 0
    pairs: float = 0.0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(self.tokens + other.tokens, self.rows + other.rows, self.pairs + other.pairs)


def chunk_work(num_new: int, context: int, rows: int = 0) -> StepWork:
    """The work of ``num_new`` tokens after ``context`` earlier tokens of their request."""
    return StepWork(num_new, rows, _pairs(num_new, context))


def _pairs(num_new: int, context: int) -> float:
    """(query, key) pairs of ``num_new`` tokens after ``context`` tokens."""
    return num_new * (context + num_new / 2)


def step_work(items: Iterable[ScheduledRequest]) -> StepWork:
    tokens, rows, pairs = 0, 0, 0.0
    for item in items:
        tokens += item.num_new + len(item.sinks)
        rows += item.num_logits
        pairs += _pairs(item.num_new, item.request.num_held)
    return StepWork(tokens, rows, pairs)


class CostModel:
    """Predicts the time of steps; call ``observe`` after each measured step."""

    def __init__(self) -> None:
        self._set([1.0] * len(PRIOR))
        self._covariance = [  # of the coefficients in units of the prior
            [PRIOR_SPREAD**2 if row == column else 0.0 for column in range(len(PRIOR))]
            for row in range(len(PRIOR))
        ]

    def _set(self, units: list[float]) -> None:
        self._units, self.coefficients = units, list(map(mul, units, PRIOR))

    def observe(self, shape: StepWork, seconds: float) -> None:
        """Learn from a measured step: ``shape`` took ``seconds``."""
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # a clock that jumped
            return
        predicted = max(self.seconds(shape), MIN_SECONDS)
        x = [feature * unit / predicted for feature, unit in zip(_features(shape), PRIOR, strict=True)]
        covariance = self._drifted()
        spread = [_dot(row, x) for row in covariance]
        variance = NOISE**2 + max(_dot(x, spread), 0.0)  # of seconds / predicted
        error = min(seconds / predicted - 1.0, OUTLIER_SIGMA * math.sqrt(variance))
        units = [unit + s * (error / variance) for unit, s in zip(self._units, spread, strict=True)]
        # uncertainty is relative: where the estimate was certain before, it follows the machine's speed
        speed = 1.0 + (_dot(x, units) - 1.0) * NOISE**2 / variance
        self._covariance = [
            [(c - a * b / variance) * (speed * speed) for c, b in zip(row, spread, strict=True)]
            for row, a in zip(covariance, spread, strict=True)
        ]
        self._set(within_bounds(units, self._covariance))

    def _drifted(self) -> list[list[float]]:
        """The covariance a step later, each variance at most the prior's."""
        wandering = [SPEED_DRIFT * unit for unit in self._units]
        covariance = [
            [c + a * b for c, b in zip(row, wandering, strict=True)]
            for row, a in zip(self._covariance, wandering, strict=True)
        ]
        scales = []
        for i, unit in enumerate(self._units):
            drift, most = DRIFT * unit, PRIOR_SPREAD * max(unit, 1.0)
            covariance[i][i] += drift * drift + MIN_VARIANCE
            scales.append(min(1.0, most / math.sqrt(covariance[i][i])))
        if min(scales) < 1.0:
            covariance = [
                [c * (a * b) for c, b in zip(row, scales, strict=True)]
                for row, a in zip(covariance, scales, strict=True)
            ]
        return covariance

    def seconds(self, shape: StepWork) -> float:
        """The predicted time of a step; 0 for an empty step."""
        return _dot(_features(shape), self.coefficients) if shape.tokens else 0.0

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        """The predicted time to compute ``num_tokens`` tokens after ``context`` tokens, alone and in a single step."""
        return self.seconds(chunk_work(num_tokens, context, rows=1))

    def added_seconds(self, num_tokens: int) -> float:
        """The least time added to a step by ``num_tokens`` more tokens of a prompt."""
        return num_tokens * self.coefficients[1]

    def tokens_within(self, seconds: float, rest: StepWork, context: int) -> int:
        """The number of tokens after ``context`` tokens that fit ``seconds``, in a step together with ``rest``."""
        _, token, row, pair = self.coefficients
        free = seconds - _dot(_features(rest), self.coefficients) - row
        if free <= 0:
            return 0
        linear, square = token + pair * context, pair / 2  # square * n^2 + linear * n = free
        if linear + square * free <= 0:
            return 1 << 30
        return int(2 * free / (linear + math.sqrt(linear**2 + 4 * square * free)))


def within_bounds(units: list[float], covariance: Sequence[Sequence[float]]) -> list[float]:
    """The likeliest coefficients in [0, ``MAX_SECONDS``], given the likeliest coefficients without bounds."""
    for _ in units:
        least = min(units)
        if least >= 0.0:
            break
        worst = units.index(least)
        shared = covariance[worst]
        part = least / max(shared[worst], MIN_VARIANCE)
        units = [unit - c * part for unit, c in zip(units, shared, strict=True)]
        units[worst] = 0.0
    return [min(max(unit, 0.0), MAX_SECONDS / prior) for unit, prior in zip(units, PRIOR, strict=True)]


def _features(shape: StepWork) -> tuple[float, float, float, float]:
    return (1.0, shape.tokens, shape.rows, shape.pairs)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(mul, a, b))

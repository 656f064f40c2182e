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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from optkit.runtime.types import ScheduledRequest

# seconds: a step, a token, a row of logits, a pair; a small model on a CPU
PRIOR = np.array((5e-3, 5e-4, 5e-4, 5e-8))
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
    return StepWork(num_new, rows, num_new * (context + num_new / 2))


def step_work(items: Iterable[ScheduledRequest]) -> StepWork:
    shape = StepWork()
    for item in items:
        shape += chunk_work(item.num_new, item.request.num_computed, item.num_logits)
    return shape


class CostModel:
    """Predicts the time of steps; call ``observe`` after each measured step."""

    def __init__(self) -> None:
        self._set(np.ones_like(PRIOR))
        self._covariance = np.eye(len(PRIOR)) * PRIOR_SPREAD**2  # of the coefficients in units of the prior

    def _set(self, units: np.ndarray) -> None:
        self._units, self.coefficients = units, units * PRIOR

    def observe(self, shape: StepWork, seconds: float) -> None:
        """Learn from a measured step: ``shape`` took ``seconds``."""
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # a clock that jumped
            return
        predicted = max(self.seconds(shape), MIN_SECONDS)
        x = _features(shape) * PRIOR / predicted
        covariance = self._drifted()
        spread = covariance @ x
        variance = NOISE**2 + max(float(x @ spread), 0.0)  # of seconds / predicted
        error = min(seconds / predicted - 1.0, OUTLIER_SIGMA * math.sqrt(variance))
        units = self._units + spread * (error / variance)
        known = covariance - spread[:, None] * spread / variance
        # uncertainty is relative: where the estimate was certain before, it follows the machine's speed
        self._covariance = known * (1.0 + (x @ units - 1.0) * NOISE**2 / variance) ** 2
        self._set(within_bounds(units, self._covariance))

    def _drifted(self) -> np.ndarray:
        """The covariance a step later, each variance at most the prior's."""
        wandering = SPEED_DRIFT * self._units
        covariance = self._covariance + wandering[:, None] * wandering
        variances = covariance.ravel()[:: len(PRIOR) + 1]  # a view of the diagonal
        variances += (DRIFT * self._units) ** 2 + MIN_VARIANCE
        most = (PRIOR_SPREAD * np.maximum(self._units, 1.0)) ** 2
        if (variances > most).any():
            scale = np.sqrt(np.minimum(1.0, most / variances))
            covariance *= scale[:, None] * scale
        return covariance

    def seconds(self, shape: StepWork) -> float:
        """The predicted time of a step; 0 for an empty step."""
        return float(_features(shape) @ self.coefficients) if shape.tokens else 0.0

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        """The predicted time to compute ``num_tokens`` tokens after ``context`` tokens, alone and in a single step."""
        return self.seconds(chunk_work(num_tokens, context, rows=1))

    def added_seconds(self, num_tokens: int) -> float:
        """The least time added to a step by ``num_tokens`` more tokens of a prompt."""
        return float(num_tokens * self.coefficients[1])

    def tokens_within(self, seconds: float, rest: StepWork, context: int) -> int:
        """The number of tokens after ``context`` tokens that fit ``seconds``, in a step together with ``rest``."""
        _, token, row, pair = self.coefficients
        free = seconds - float(_features(rest) @ self.coefficients) - row
        if free <= 0:
            return 0
        linear, square = token + pair * context, pair / 2  # square * n^2 + linear * n = free
        if linear + square * free <= 0:
            return 1 << 30
        return int(2 * free / (linear + math.sqrt(linear**2 + 4 * square * free)))


def within_bounds(units: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """The likeliest coefficients in [0, ``MAX_SECONDS``], given the likeliest coefficients without bounds."""
    for _ in units:
        worst = int(units.argmin())
        if units[worst] >= 0.0:
            break
        shared = covariance[worst]
        units = units - shared * (units[worst] / max(shared[worst], MIN_VARIANCE))
        units[worst] = 0.0
    return units.clip(0.0, MAX_SECONDS / PRIOR)


def _features(shape: StepWork) -> np.ndarray:
    return np.array((1.0, shape.tokens, shape.rows, shape.pairs))

"""Cost model: how long a step will take, learned from the steps that were taken.

    seconds = a + b * tokens + c * rows + d * pairs

``tokens`` are computed in the step, ``rows`` of them get logits, and ``pairs`` counts the (query, key) pairs of
attention. ``a`` is what a step costs however small it is, above all reading the weights once. The coefficients follow
the machine by recursive least squares with exponential forgetting (Ljung, System Identification, ch. 11).

Guard rails, each for a reason:

- the *relative* error is minimised: a decode of 10 ms counts as much as a prefill of a second. It also makes the fit
  robust: a step during which the process was frozen has a large time and hence next to no weight;
- no coefficient becomes negative, so a longer prompt is never predicted to be faster;
- forgetting stops where it would forget what has not been seen lately (a long decode-only phase must not unlearn
  what prefill costs): no variance grows beyond the prior's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from optkit.runtime.types import ScheduledSequence

PRIOR = (5e-3, 5e-4, 5e-4, 5e-8)  # seconds: a step, a token, a row of logits, a pair; a small model on a CPU
PRIOR_SPREAD = 10.0  # standard deviation of the prior, in units of itself
NOISE = 0.1  # relative, of one measurement
SHORTEST, LONGEST = 1e-6, 3600.0  # seconds of a step
FORGETTING = 0.995  # a measurement counts half after 140 newer ones


@dataclass(frozen=True)
class StepShape:
    """What a step's time depends on."""

    tokens: int = 0
    rows: int = 0
    pairs: float = 0.0

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(self.tokens + other.tokens, self.rows + other.rows, self.pairs + other.pairs)


def chunk_shape(num_new: int, context: int, rows: int = 0) -> StepShape:
    """``num_new`` tokens after ``context`` others of their sequence."""
    return StepShape(num_new, rows, num_new * (context + num_new / 2))


def step_shape(items: Iterable[ScheduledSequence]) -> StepShape:
    shape = StepShape()
    for item in items:
        shape += chunk_shape(item.num_new, item.seq.num_computed, item.num_logits)
    return shape


class CostModel:
    """Predicts steps; ``observe`` each one that was measured."""

    def __init__(self) -> None:
        self.coefficients = np.array(PRIOR)
        self._most_variance = (self.coefficients * PRIOR_SPREAD / NOISE) ** 2
        self._covariance = np.diag(self._most_variance)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of ``shape`` took ``seconds``."""
        if not SHORTEST <= seconds <= LONGEST:  # a clock that jumped
            return
        x = _features(shape) / seconds  # the goal is x @ coefficients == 1
        spread = self._covariance @ x
        gain = spread / (1.0 + x @ spread)
        coefficients = self.coefficients + gain * (1.0 - x @ self.coefficients)
        self.coefficients = np.maximum(coefficients, 0.0)
        covariance = self._covariance - np.outer(gain, spread)
        forgotten = covariance / FORGETTING
        within = bool((np.diag(forgotten) <= self._most_variance).all())
        self._covariance = forgotten if within else covariance

    def seconds(self, shape: StepShape) -> float:
        """The predicted time of a step; 0 for an empty one."""
        return float(_features(shape) @ self.coefficients) if shape.tokens else 0.0

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        """The predicted time to compute ``num_tokens`` tokens after ``context`` others, alone and in one step."""
        return self.seconds(chunk_shape(num_tokens, context, rows=1))

    def added_seconds(self, num_tokens: int) -> float:
        """What ``num_tokens`` more tokens of a prompt add to a step, at the least."""
        return float(num_tokens * self.coefficients[1])

    def tokens_within(self, seconds: float, rest: StepShape, context: int) -> int:
        """How many tokens after ``context`` others fit ``seconds``, in a step that also does ``rest``; 0 or more."""
        _, token, row, pair = self.coefficients
        free = seconds - float(_features(rest) @ self.coefficients) - row
        if free <= 0:
            return 0
        linear, square = token + pair * context, pair / 2  # square * n^2 + linear * n = free
        if linear + square * free <= 0:
            return 1 << 30
        return int(2 * free / (linear + math.sqrt(linear**2 + 4 * square * free)))


def _features(shape: StepShape) -> np.ndarray:
    return np.array((1.0, shape.tokens, shape.rows, shape.pairs))

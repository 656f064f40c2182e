"""Seconds of a step of an artifact on the machine at hand, fitted to measured steps.

    seconds = a + b * few + c * more + d * rows + e * prefill pairs + f * decode context

``few`` are the tokens of a step up to ``FEW_TOKENS``, where a CPU waits for the weights, and ``more`` the tokens
beyond, where arithmetic decides. ``rows`` are rows of logits. A pair of (query, key) costs less in a prompt, where a
key read once serves many queries, than in a decode, which reads all keys for a single query: two coefficients.

The engine's own ``CostModel`` has four coefficients, because the model learns while serving. The simulator keeps the
``CostModel`` inside the scheduler, as a server does, and takes the time of a step from here.

The fit minimizes relative errors, with no coefficient below zero. Six coefficients have 64 subsets, so the best fit is
found by trying each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optkit.runtime.scheduling.cost_model import CostModel, chunk_work
from optkit.runtime.types import ScheduledRequest

FEW_TOKENS = 64
WARM_STEPS = ((64, 0), (1, 64), (256, 0), (1, 256))  # (tokens, context) that teach the scheduler's cost model


@dataclass(frozen=True)
class StepShape:
    """The features of a step by which the time is predicted."""

    tokens: int = 0
    rows: int = 0
    prefill_pairs: float = 0.0
    decode_context: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        few = min(self.tokens, FEW_TOKENS)
        return (1.0, few, self.tokens - few, self.rows, self.prefill_pairs, self.decode_context)


@dataclass(frozen=True)
class MeasuredStep:
    """A step and its time; ``start`` is on a clock that all processes share, in seconds."""

    shape: StepShape
    seconds: float
    start: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.seconds


def step_shape(items: Iterable[ScheduledRequest]) -> StepShape:
    """The shape of a step with ``items``. An item with a draft counts as a decode."""
    tokens, rows, pairs, context = 0, 0, 0.0, 0
    for item in items:
        tokens += item.num_new
        rows += item.num_logits
        before = item.request.num_held
        if item.num_new == 1 + len(item.draft):
            context += item.num_new * before
        else:
            pairs += item.num_new * (before + item.num_new / 2)
    return StepShape(tokens, rows, pairs, context)


@dataclass(frozen=True)
class StepCosts:
    """Fitted coefficients, and how far the fit is from the measured steps.

    Attributes:
        coefficients: seconds for each of ``StepShape.features``.
        error: the median relative error of the fit.
        worst: the largest relative error.
    """

    coefficients: tuple[float, ...]
    error: float = 0.0
    worst: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """The predicted time of a step."""
        return sum(a * b for a, b in zip(self.coefficients, shape.features, strict=True))

    def step(self, items: Iterable[ScheduledRequest]) -> float:
        """The predicted time of a step with ``items``."""
        return self.seconds(step_shape(items))

    def alone(self, tokens: int, context: int) -> float:
        """The predicted time of a step with ``tokens`` tokens of a single request after ``context`` earlier tokens."""
        if tokens == 1:
            return self.seconds(StepShape(1, 1, 0.0, context))
        return self.seconds(StepShape(tokens, 1, tokens * (context + tokens / 2)))

    def scaled(self, factor: float) -> StepCosts:
        """The costs of a machine slower by ``factor``."""
        return replace(self, coefficients=tuple(factor * value for value in self.coefficients))


def median_seconds(steps: Iterable[MeasuredStep]) -> dict[StepShape, float]:
    """The median time of each shape in ``steps``."""
    times: dict[StepShape, list[float]] = {}
    for step in steps:
        times.setdefault(step.shape, []).append(step.seconds)
    return {shape: float(np.median(of_shape)) for shape, of_shape in times.items()}


def fit(steps: Sequence[MeasuredStep]) -> StepCosts:
    """The best fit to the median times of the shapes in ``steps``.

    Raises:
        ValueError: no steps, or a time of 0 or less.
    """
    if not steps or min(step.seconds for step in steps) <= 0:
        raise ValueError("a fit needs steps with positive times")
    medians = median_seconds(steps)
    seconds = np.array(list(medians.values()))
    features = np.array([shape.features for shape in medians]) / seconds[:, None]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    columns, target = features / scale, np.ones(len(medians))
    best, least = np.zeros(features.shape[1]), float(np.inf)
    for size in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), size):
            part = columns[:, chosen]
            found, *_ = np.linalg.lstsq(part, target, rcond=1e-10)
            rest = float(np.sum((part @ found - target) ** 2))
            if found.min() >= 0 and rest < least - 1e-12:
                best, least = np.zeros(features.shape[1]), rest
                best[list(chosen)] = found
    errors = np.abs(columns @ best - target)
    values = tuple(float(value) for value in best / scale)
    return StepCosts(values, float(np.median(errors)), float(errors.max()))


def taught_cost_model(alone: Callable[[int, int], float]) -> CostModel:
    """The cost model of a scheduler after the first requests.

    Args:
        alone: seconds of a step with so many tokens of a single request after so many earlier tokens.
    """
    model = CostModel()
    for tokens, context in WARM_STEPS * 3:
        model.observe(chunk_work(tokens, context, rows=1), alone(tokens, context))
    return model

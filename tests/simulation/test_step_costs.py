"""The fit of step costs finds known coefficients again, never a negative one, and says how far it is off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.types import EngineRequest, Request, SamplingParams, ScheduledRequest
from optkit.simulation.step_costs import MeasuredStep, StepCosts, StepShape, fit, step_shape

SHAPES = [
    StepShape(tokens, 1, tokens * (context + tokens / 2), 0)
    for tokens in (16, 64, 128, 256, 512, 1024)
    for context in (0, 256, 1024)
] + [StepShape(rows, rows, 0.0, rows * context) for rows in (1, 2, 4, 8, 16) for context in (1, 256, 1024)]


def item(num_new: int, context: int, draft: tuple[int, ...] = (), rest: int = 0) -> ScheduledRequest:
    ids = [1] * (context + num_new - len(draft) + rest)
    received = EngineRequest(
        request_id="r", prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=4), arrival=0.0
    )
    return ScheduledRequest(Request(received, ids, num_computed=context), num_new, draft)


def test_the_shape_of_a_step_tells_prompts_from_decodes() -> None:
    assert step_shape([item(100, 50)]) == StepShape(100, 1, 100 * 100, 0)
    assert step_shape([item(100, 50, rest=7)]).rows == 0
    assert step_shape([item(1, 30), item(1, 40)]) == StepShape(2, 2, 0.0, 70)
    assert step_shape([item(3, 30, draft=(5, 6))]) == StepShape(3, 3, 0.0, 90)
    assert step_shape([]) == StepShape()


coefficients = st.tuples(*(st.floats(scale, 10 * scale) for scale in (1e-3, 1e-4, 1e-4, 1e-4, 1e-7, 1e-7)))


@given(coefficients)
def test_exact_times_give_their_coefficients_back(values: tuple[float, ...]) -> None:
    truth = StepCosts(values)
    found = fit([MeasuredStep(shape, truth.seconds(shape)) for shape in SHAPES])
    assert found.coefficients == pytest.approx(values, rel=1e-5)
    assert found.worst < 1e-6


@given(coefficients, st.integers(0, 1000))
def test_noise_moves_predictions_little_and_makes_no_coefficient_negative(
    values: tuple[float, ...], seed: int
) -> None:
    truth, noise = StepCosts(values), np.random.default_rng(seed)
    found = fit([MeasuredStep(s, truth.seconds(s) * float(noise.normal(1, 0.02))) for s in SHAPES])
    assert min(found.coefficients) >= 0
    assert found.error < 0.05
    for shape in SHAPES:
        assert found.seconds(shape) == pytest.approx(truth.seconds(shape), rel=0.12)


def test_the_fit_is_the_best_without_negative_coefficients() -> None:
    """Against projected gradient descent, another way to the same minimum."""
    noise = np.random.default_rng(3)
    times = [float(noise.uniform(0.01, 0.1)) for _ in SHAPES]
    found = fit([MeasuredStep(*one) for one in zip(SHAPES, times, strict=True)])
    rows = np.array([shape.features for shape in SHAPES]) / np.array(times)[:, None]
    scale = np.abs(rows).max(axis=0)
    rows, guess = rows / scale, np.zeros(6)
    step = 1 / np.linalg.norm(rows, 2) ** 2
    for _ in range(200_000):
        guess = np.maximum(guess - step * rows.T @ (rows @ guess - 1), 0)
    mine = np.sum((rows @ (np.array(found.coefficients) * scale) - 1) ** 2)
    assert mine <= np.sum((rows @ guess - 1) ** 2) + 1e-9


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="positive times"):
        fit([])
    with pytest.raises(ValueError, match="positive times"):
        fit([MeasuredStep(StepShape(1), 0.0)])


def test_several_times_of_a_shape_count_as_their_median() -> None:
    truth = StepCosts((1e-3, 1e-4, 1e-4, 1e-4, 1e-7, 1e-7))
    noisy = [
        MeasuredStep(shape, truth.seconds(shape) * factor) for shape in SHAPES for factor in (0.9, 1.0, 1.7)
    ]
    assert fit(noisy).coefficients == pytest.approx(truth.coefficients, rel=1e-5)

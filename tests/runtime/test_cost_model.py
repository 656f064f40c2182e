"""Cost model: it finds a machine's costs, follows them, and is not misled by a stall."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.cost_model import CostModel, StepShape, chunk_shape

TRUE = (8e-3, 3e-4, 1e-3, 2e-8)


def steps(count: int, seed: int = 0) -> list[StepShape]:
    generator = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        decodes, context = int(generator.integers(0, 9)), int(generator.integers(1, 2000))
        shape = StepShape(decodes, decodes, decodes * context)
        if generator.random() < 0.3:
            shape += chunk_shape(int(generator.integers(1, 1024)), int(generator.integers(0, 1000)), 1)
        shapes.append(shape if shape.tokens else StepShape(1, 1, context))
    return shapes


def truth(shape: StepShape, scale: float = 1.0) -> float:
    return scale * float(np.dot(TRUE, (1, shape.tokens, shape.rows, shape.pairs)))


def errors(model: CostModel, scale: float = 1.0) -> np.ndarray:
    return np.array([model.seconds(s) / truth(s, scale) - 1 for s in steps(100, seed=9)])


def test_it_learns_a_machine_within_a_few_steps() -> None:
    model, noise = CostModel(), np.random.default_rng(2)
    assert np.abs(errors(model)).max() > 0.2  # the prior is another machine
    for shape in steps(150):
        model.observe(shape, truth(shape) * (1 + 0.1 * noise.uniform(-1, 1)))
    assert np.abs(errors(model)).max() < 0.1


def test_it_follows_a_machine_that_slows_down() -> None:
    model = CostModel()
    for scale in (1.0, 1.7):
        for shape in steps(800):
            model.observe(shape, truth(shape, scale))
    assert np.abs(errors(model, 1.7)).max() < 0.1


def test_a_stall_changes_next_to_nothing() -> None:
    model = CostModel()
    for i, shape in enumerate(steps(300)):
        model.observe(shape, 60.0 if i % 50 == 49 else truth(shape))
    assert np.abs(errors(model)).max() < 0.2


def test_decoding_for_hours_does_not_unlearn_prefill() -> None:
    model, noise = CostModel(), np.random.default_rng(4)
    for shape in steps(200):
        model.observe(shape, truth(shape))
    for _ in range(20000):
        model.observe(StepShape(4, 4, 2000), truth(StepShape(4, 4, 2000)) * (1 + 0.1 * noise.uniform(-1, 1)))
    assert model.prefill_seconds(1000) == pytest.approx(truth(chunk_shape(1000, 0, 1)), rel=0.3)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4096),
            st.integers(0, 64),
            st.floats(0, 1e7),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=50,
    )
)
def test_whatever_is_measured_predictions_stay_sane(
    measured: list[tuple[int, int, float, float]],
) -> None:
    model = CostModel()
    for tokens, rows, pairs, seconds in measured:
        model.observe(StepShape(tokens, rows, pairs), seconds)
    small, large = model.seconds(StepShape(1, 1, 10.0)), model.seconds(StepShape(64, 2, 1000.0))
    assert 0 <= small <= large < float("inf")


@given(st.floats(0.0, 2.0), st.integers(0, 8), st.integers(0, 2000))
def test_tokens_within_a_time_take_that_time(seconds: float, decodes: int, context: int) -> None:
    model, rest = CostModel(), StepShape(decodes, decodes, 100.0 * decodes)
    count = model.tokens_within(seconds, rest, context)
    if count:
        assert model.seconds(rest + chunk_shape(count, context, 1)) <= seconds * (1 + 1e-6)
    assert model.seconds(rest + chunk_shape(count + 2, context, 1)) > seconds

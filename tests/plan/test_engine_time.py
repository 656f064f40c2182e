"""The engine's own time: a step without a model, and more time for more sequences and a larger vocabulary."""

from __future__ import annotations

import pytest

from optkit.plan import engine_time
from optkit.plan.engine_time import decode_seconds
from optkit.plan.steps import StepModel
from tests.support.graphs import captured
from tests.support.target import TARGET


def test_the_time_is_split_into_step_and_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_time, "decode_seconds", lambda vocab_size, count: 0.001 + 0.0002 * count)
    found = engine_time.engine_time(100)
    assert found.step == pytest.approx(0.001) and found.row == pytest.approx(0.0002)
    steps = StepModel(captured("llama"), TARGET).with_engine(*found)
    assert steps.decode(5, 9).engine == pytest.approx(0.002)


def test_a_step_without_a_model_takes_time_and_ends() -> None:
    assert 0 < decode_seconds(64, 1) < 0.1

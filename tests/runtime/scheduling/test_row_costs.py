"""Measured times of steps of few rows."""

from __future__ import annotations

import pytest

from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from optkit.runtime.scheduling.row_costs import LARGEST_CHANGE, MOST_ROWS, RowCosts


class Linear(CostModel):
    def seconds(self, shape: StepWork) -> float:
        return 1.0 + 0.1 * shape.rows


def work(rows: int) -> StepWork:
    return StepWork(rows, rows, 10.0 * rows)


def test_without_measurements_the_model_decides() -> None:
    costs = RowCosts(Linear())
    assert [costs.seconds(work(rows)) for rows in (1, 5)] == [Linear().seconds(work(rows)) for rows in (1, 5)]


def test_measured_rows_are_learned_and_those_between_lie_on_a_line() -> None:
    costs, model = RowCosts(Linear()), Linear()
    for _ in range(60):
        costs.observe(work(2), 2.0 * model.seconds(work(2)))
        costs.observe(work(6), 1.0 * model.seconds(work(6)))
    for rows, factor in ((1, 2.0), (2, 2.0), (4, 1.5), (6, 1.0), (30, 1.0)):
        assert costs.seconds(work(rows)) == pytest.approx(factor * model.seconds(work(rows)), rel=0.03)


def test_what_was_slow_once_is_forgotten() -> None:
    """Else a first slow step with guesses would be the last one with guesses."""
    costs, model = RowCosts(Linear()), Linear()
    for _ in range(10):
        costs.observe(work(3), 5.0)
    assert costs.seconds(work(3)) > 2 * model.seconds(work(3))
    for _ in range(1500):
        costs.observe(work(1), model.seconds(work(1)))
    assert costs.seconds(work(3)) < 1.05 * model.seconds(work(3))


def test_one_frozen_step_says_little() -> None:
    costs = RowCosts(Linear())
    for _ in range(20):
        costs.observe(work(3), 1.3)
    costs.observe(work(3), 1000.0)
    assert costs.seconds(work(3)) < 1.3 * LARGEST_CHANGE


def test_prompts_and_odd_clocks_are_left_out() -> None:
    costs = RowCosts(Linear())
    for shape, seconds in (
        (StepWork(9, 1, 1.0), 50.0),
        (StepWork(0, 0, 0.0), 50.0),
        (work(MOST_ROWS + 1), 50.0),
        (work(2), 0.0),
        (work(2), -1.0),
    ):
        costs.observe(shape, seconds)
    assert costs.seconds(work(2)) == Linear().seconds(work(2))

"""The pace of a machine: recorded from steps, repeated in a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from optkit.bench.workload import BenchRequest
from optkit.simulation.pace import STEADY, Pace, recorded
from optkit.simulation.simulator import simulate
from optkit.simulation.step_costs import MeasuredStep, StepCosts, StepShape
from tests.support.tuning_lab import LIMITS

COSTS = StepCosts((0.0, 1e-3, 1e-3, 0.0, 0.0, 0.0))  # 1 ms a token
PACE = Pace((1.0, 1.5), (1.0, 2.0))


def steps(*seconds: float, shape: int = 50, start: float = 100.0, between: float = 0.0) -> list[MeasuredStep]:
    """Steps of one shape, one after the other with a pause ``between``."""
    found = []
    for took in seconds:
        found.append(MeasuredStep(StepShape(shape), took, start))
        start += took + between
    return found


def test_slow_seconds_are_recorded_over_the_median() -> None:
    found = recorded(steps(*[0.05] * 80, *[0.1] * 10, between=0.01))
    assert found.ends[-1] == pytest.approx(80 * 0.06 + 10 * 0.11, abs=0.12)  # by the clock, pauses included
    assert min(found.slowness) == pytest.approx(1.0) and max(found.slowness) == pytest.approx(2.0)
    lengths = np.diff((0.0, *found.ends))
    slow = sum(length for length, s in zip(lengths, found.slowness, strict=True) if s > 1.5)
    assert slow == pytest.approx(10 * 0.11, rel=0.1)


def test_shapes_with_times_that_no_formula_explains_are_no_change_of_pace() -> None:
    mixed = [step for i in range(40) for step in steps(0.05 + 0.01 * (i % 7), shape=i % 7, start=0.2 * i)]
    assert set(recorded(mixed).slowness) == {1.0}


def test_a_break_between_two_processes_is_left_out() -> None:
    found = recorded([*steps(*[0.05] * 20), *steps(*[0.05] * 20, start=200.0)])
    assert found.ends[-1] == pytest.approx(2.0, abs=0.11)  # less than a window may be left over


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_record_too_short_is_a_steady_pace(count: int) -> None:
    assert recorded(steps(*[0.05] * count)) == STEADY
    assert [STEADY.end(start, 0.3) for start in (0.0, 0.9, 7.3)] == pytest.approx([0.3, 1.2, 7.6])


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [
        (0.0, 0.4, 0.4),
        (1.0, 0.2, 1.4),  # all of it slow
        (0.8, 0.4, 1.4),  # the half of it slow
        (1.2, 0.65, 2.0),  # slow, then fast again in the next repetition
        (0.0, 12.5, 15.0),  # ten repetitions of 1.25 seconds of work
        (151.2, 0.65, 152.0),
    ],
)
def test_a_step_takes_the_pace_of_each_of_its_seconds(start: float, seconds: float, end: float) -> None:
    assert PACE.end(start, seconds) == pytest.approx(end)


def test_much_work_takes_the_mean_pace_whatever_the_length_of_the_steps() -> None:
    assert PACE.mean == pytest.approx(1.5 / 1.25)
    for length in (0.01, 0.07, 0.9, 3.0):
        now, work = 0.0, 0.0
        while work < 1000:
            now, work = PACE.end(now, length), work + length
        assert now == pytest.approx(work * PACE.mean, rel=1e-3)


def test_requests_in_a_slow_second_take_longer_and_the_others_do_not() -> None:
    """By hand: prompts of 100 tokens and one token out take 0.1 s, 0.2 s in the second half of each 2 s."""
    requests = [BenchRequest(i, tuple(range(100 * i, 100 * i + 100)), 1, 0.25 * i) for i in range(8)]
    found = simulate(LIMITS, COSTS, requests, pace=Pace((1.0, 2.0), (1.0, 2.0))).records
    taken = [record.done - record.send for record in found if record.done is not None]
    assert taken == pytest.approx([0.1] * 4 + [0.2] * 4)
    assert [r.done for r in simulate(LIMITS, COSTS, requests).records] == pytest.approx(
        [0.25 * i + 0.1 for i in range(8)]
    )

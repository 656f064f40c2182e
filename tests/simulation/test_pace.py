"""The pace of a machine: recorded from steps, replayed in a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.pace import STEADY, Pace, recorded
from optkit.simulation.simulator import simulate
from optkit.simulation.step_costs import StepCosts, StepShape

COSTS = StepCosts((0.0, 1e-3, 1e-3, 0.0, 0.0, 0.0))  # 1 ms a token
CONFIG = SchedulerConfig(
    max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=4096, block_size=32, num_blocks=1000
)


def test_a_slow_second_in_five_is_recorded_with_a_mean_of_one() -> None:
    steps = [(StepShape(50), 0.05)] * 80 + [(StepShape(50), 0.1)] * 10
    found = recorded(COSTS, steps)
    assert found.ends[-1] == pytest.approx(5.0)
    lengths = np.diff((0.0, *found.ends))
    work = lengths / np.array(found.slowness)  # seconds at the mean pace
    assert work.sum() == pytest.approx(lengths.sum())
    assert found.at(4.5) == pytest.approx(2 * found.at(1.0)) and found.at(5.5) == found.at(0.5)


@pytest.mark.parametrize("steps", [[], [(StepShape(50), 0.05)] * 3, [(StepShape(0), 0.2)] * 5])
def test_a_record_too_short_or_without_a_prediction_is_a_steady_pace(
    steps: list[tuple[StepShape, float]],
) -> None:
    assert recorded(COSTS, steps) == STEADY
    assert {STEADY.at(time) for time in (0.0, 0.99, 1.0, 7.3)} == {1.0}


def test_requests_behind_a_slow_second_wait_and_the_others_do_not() -> None:
    """By hand: prompts of 100 tokens and one token out take 0.1 s at the mean, 0.2 s in the second half of 2 s."""
    requests = [BenchRequest(i, tuple(range(100 * i, 100 * i + 100)), 1, 0.25 * i) for i in range(8)]
    pace = Pace((1.0, 2.0), (1.0, 2.0))
    found = simulate(CONFIG, COSTS, requests, pace=pace).records
    taken = [record.done - record.send for record in found if record.done is not None]
    assert taken == pytest.approx([0.1] * 4 + [0.2] * 4)
    assert [r.done for r in simulate(CONFIG, COSTS, requests).records] == pytest.approx(
        [0.25 * i + 0.1 for i in range(8)]
    )

"""A simulated fleet: one replica is the simulator of one engine; reports predict what then happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.routing import ShortestQueue, Turns
from optkit.bench.workload import BenchRequest
from optkit.runtime.kv.digests import new_secret
from optkit.runtime.report import Mark
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.reporting import report
from optkit.runtime.types import EngineRequest
from optkit.simulation.fleet import SimulatedReplica, simulate_fleet
from optkit.simulation.simulator import simulate
from optkit.simulation.step_costs import StepCosts

COSTS = StepCosts((0.005, 1 / 3000, 1 / 3000, 0.0, 0.0, 0.0))
CONFIG = SchedulerConfig(
    max_num_seqs=8, max_model_len=1024, block_size=16, num_blocks=400, prefill_target_tokens=256
)


def requests(count: int, rate: float, seed: int = 0, outputs: int = 4) -> list[BenchRequest]:
    draw = np.random.default_rng(seed)
    arrivals = draw.exponential(1 / rate, count).cumsum()
    stems = [tuple(range(1000 * n, 1000 * n + 200)) for n in range(5)]
    found = []
    for index, at in enumerate(arrivals):
        own = tuple(range(10_000 + 700 * index, 10_000 + 700 * index + int(draw.integers(5, 600))))
        found.append(BenchRequest(index, stems[draw.integers(5)] + own, outputs, float(at)))
    return found


def test_a_fleet_of_one_is_one_engine() -> None:
    asked = requests(60, rate=4.0)
    alone = simulate(CONFIG, COSTS, asked)
    fleet = simulate_fleet(CONFIG, COSTS, asked, Turns(), secret=new_secret())
    wanted = [r.first_token - r.send for r in alone.records]
    assert sorted(fleet.ttft) == pytest.approx(sorted(wanted))
    assert fleet.given == [60] and fleet.prompt_tokens == sum(len(r.prompt_ids) for r in asked)


def test_every_request_is_answered_once_and_turns_are_even() -> None:
    found = simulate_fleet(
        CONFIG, [COSTS, COSTS.scaled(2.0)], requests(50, rate=6.0), Turns(), secret=new_secret()
    )
    assert len(found.ttft) == 50 and found.given == [25, 25]
    slow = simulate_fleet(
        CONFIG, [COSTS, COSTS.scaled(2.0)], requests(50, rate=6.0), ShortestQueue(), secret=new_secret()
    )
    assert slow.given[0] > slow.given[1], "the slower replica has the longer queue"


class Probe(Turns):
    """Turns, with the forecast of the replica noted at each arrival."""

    def begin(self, replicas: Sequence[SimulatedReplica], clock: Callable[[], float]) -> None:
        super().begin(replicas, clock)
        self.replicas, self.forecasts = replicas, dict[str, float]()

    def choose(self, request: EngineRequest) -> int:
        replica = self.replicas[0]
        found = report(replica.scheduler, Mark(), in_step=replica.is_stepping)
        self.forecasts[request.request_id] = found.queue_seconds
        return super().choose(request)

    def first_token(self, request_id: str, first: object) -> None:
        self.waits = getattr(self, "waits", {}) | {request_id: first.before_queue + first.queue}


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_the_reported_queue_is_the_wait_of_the_next_arrival(seed: int) -> None:
    """Against the wait that follows in the simulation, whose prompts are not known to the forecast beforehand."""
    probe = Probe()
    simulate_fleet(CONFIG, COSTS, requests(80, rate=7.0, seed=seed), probe, secret=new_secret())
    waits = np.array([probe.waits[name] for name in probe.forecasts])
    guesses = np.array(list(probe.forecasts.values()))
    assert waits.max() > 0.2, "nothing waited: the load is too low to test anything"
    assert np.abs(guesses - waits).mean() <= 0.25 * waits.mean() + 0.01
    assert np.corrcoef(guesses, waits)[0, 1] > 0.9

"""Replicas: queues against the closed formula of Pollaczek and Khinchine, and limits by hand."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from optkit.plan.replicas import Demand, Load, Stream, equilibrium, fewest, load, percentiles, queued
from optkit.plan.steps import Step
from optkit.plan.virtual import Arrival, request, serve
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.simulator import simulate
from optkit.simulation.step_costs import StepCosts, StepShape

SERVICE = 0.1  # seconds of a prefill


def arrivals(rate: float, count: int = 40_000, output: int = 1) -> list[Arrival]:
    generator, at, found = random.Random(3), 0.0, []
    for _ in range(count):
        at += generator.expovariate(rate)
        found.append(Arrival(at, 100, output))
    return found


def demand(decode: float = 1e-9, places: int = 64) -> Demand:
    return Demand(lambda tokens: SERVICE, lambda batch, context: decode, lambda context: places)


@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_waits_are_those_of_an_m_d_1_queue(use: float) -> None:
    times = queued(arrivals(use / SERVICE), 1, {100: SERVICE})
    expected = use * SERVICE / (2 * (1 - use))  # mean wait, Pollaczek-Khinchine
    assert statistics.fmean(times) - SERVICE == pytest.approx(expected, rel=0.1)


def test_turns_among_replicas_make_arrivals_more_even() -> None:
    """Every second arrival of a Poisson process waits less than one of a Poisson process of half the rate."""
    two = statistics.fmean(queued(arrivals(12.0), 2, {100: SERVICE}))
    assert SERVICE < two < statistics.fmean(queued(arrivals(6.0), 1, {100: SERVICE}))


def of(tokens: float, busy: float, places: int = 64) -> Stream:
    return Stream(busy / SERVICE, tokens, SERVICE, 1.0, 100, places)


def test_the_batch_is_that_of_littles_law() -> None:
    """50 tokens/s at 40 ms a token are 2 requests. Steps of prompts of 100 ms for half the time: a token each, too."""
    assert equilibrium(of(50.0, 0.0), demand(0.04)) == (pytest.approx(2.0), pytest.approx(0.04))
    assert equilibrium(of(50.0, 0.5), demand(0.04)) == (pytest.approx(50 / 17.5), pytest.approx(1 / 17.5))
    assert math.isinf(equilibrium(of(50.0, 0.0, places=1), demand(0.04))[1])
    assert math.isinf(equilibrium(of(50.0, 1.0), demand(0.04))[1])
    assert equilibrium(of(0.0, 0.5), demand(0.04)) == (0.0, 0.04)


def test_the_batch_is_the_smallest_that_keeps_up() -> None:
    """Steps of 10 ms + 1 ms a sequence, 500 tokens/s: b = 500 (0.01 + 0.001 b), so b = 10."""
    growing = replace(demand(), decode=lambda batch, context: 0.01 + 0.001 * batch)
    batch, token = equilibrium(of(500.0, 0.0), growing)
    assert batch == pytest.approx(10.0) and token == pytest.approx(0.02)


def test_a_replica_that_always_decodes_has_room_for_prompts() -> None:
    """Decodes run all the time at a batch of 6: prompts wait for half a step, and not for the end of decoding."""
    steps = replace(
        demand(0.02),
        beside=lambda batch, context: 0.002 * batch,
        chunks=lambda tokens: 2,
        most_running=lambda _: 64,
    )
    found = load(arrivals(3.0, 4000, output=71), 1, steps)
    assert not found.saturated and found.batch == pytest.approx(3 * 70 * found.tpot, rel=0.02)
    assert found.utilization == pytest.approx(0.3 + 3 * 70 * 0.02 / 64, rel=0.05)
    assert SERVICE < found.ttft[0] < 2 * SERVICE
    alone = load(arrivals(3.0, 4000), 1, demand())
    assert alone.utilization == pytest.approx(0.3, rel=0.05) and alone.ttft[1] < found.ttft[1]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_a_replica_is_that_of_the_scheduler(share: float) -> None:
    """The real scheduler on a virtual clock, with steps of a fixed cost: TTFT and TPOT within a quarter."""
    costs = StepCosts((0.004, 3e-4, 3e-4, 5e-4, 0.0, 0.0))
    config = SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1024, block_size=32, num_blocks=4096,
        enable_prefix_caching=False,
    )  # fmt: skip
    few = 3e-4 * 64 + 3e-4 * (256 - 64)
    steps = Demand(
        prefill=lambda tokens: 2 * (0.004 + 5e-4) + few * tokens / 256 - 5e-4,
        decode=lambda batch, context: 0.004 + (3e-4 + 5e-4) * batch,
        most_running=lambda context: 32,
        chunks=lambda tokens: 2,
        beside=lambda batch, context: (3e-4 + 5e-4) * batch,
    )
    shape = [Arrival(0.0, 400, 40)] * 300
    most = 300 / simulate(config, costs, [request(i, one) for i, one in enumerate(shape)]).seconds
    generator, at, load_ = random.Random(5), 0.0, []
    for _ in range(600):
        at += generator.expovariate(share * most)
        load_.append(Arrival(at, 400, 40))
    real = serve(config, lambda step: costs_of(costs, step), load_)
    found = load(load_, 1, steps)
    assert not found.saturated
    ttfts = sorted(one.ttft for one in real)
    assert found.ttft[0] == pytest.approx(ttfts[300], rel=0.25)
    assert found.ttft[1] == pytest.approx(ttfts[570], rel=0.25)
    assert found.tpot == pytest.approx(statistics.fmean(one.tpot for one in real), rel=0.25)


def costs_of(costs: StepCosts, step: Step) -> float:
    tokens = sum(point.tokens for point in step)
    return costs.seconds(StepShape(tokens, sum(point.sequences for point in step), 0.0, 0))


@pytest.mark.parametrize(("rate", "reason"), [(12.0, "prefill takes all"), (9.5, "of the time in use")])
def test_saturation_is_said_and_not_predicted(rate: float, reason: str) -> None:
    found = load(arrivals(rate, 2000), 1, demand())
    assert reason in found.saturated and all(map(math.isinf, found.ttft))


def test_the_fewest_replicas_hold_and_one_less_does_not() -> None:
    load_ = arrivals(40.0, 4000)
    holds = lambda found: not found.saturated and found.ttft[1] < 0.25  # noqa: E731
    found, _ = fewest(load_, demand(), holds)
    assert isinstance(found, Load) and holds(found)
    assert found.replicas >= 5 and not holds(load(load_, found.replicas - 1, demand()))


def test_an_impossible_bound_ends() -> None:
    found, last = fewest(arrivals(40.0, 500), demand(), lambda found: found.ttft[1] < SERVICE / 2)
    assert found is None and last.ttft[1] >= SERVICE


def test_percentiles_are_samples() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == (50.0, 95.0, 99.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_a_saturated_load_is_json_for_every_reader() -> None:
    found = load(arrivals(12.0, 200), 1, demand()).to_dict()
    assert found["ttft"] == [None] * 3 and found["tpot"] is None and found["saturated"]

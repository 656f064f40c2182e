"""Replicas: queues against the closed formula of Pollaczek and Khinchine, and limits by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from optkit.plan.replicas import Demand, Load, equilibrium, fewest, load, percentiles, queued
from optkit.plan.virtual import Arrival

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


def test_the_batch_is_that_of_littles_law() -> None:
    """50 tokens/s at 40 ms a token are 2 requests; prefill that takes half the time doubles both."""
    assert equilibrium(50.0, 0.0, demand(0.04), 100, 64) == (pytest.approx(2.0), pytest.approx(0.04))
    assert equilibrium(50.0, 0.5, demand(0.04), 100, 64) == (pytest.approx(4.0), pytest.approx(0.08))
    assert math.isinf(equilibrium(50.0, 0.0, demand(0.04), 100, 1)[1])
    assert math.isinf(equilibrium(50.0, 1.0, demand(0.04), 100, 64)[1])


def test_decoding_slows_prefill_by_its_share() -> None:
    alone = load(arrivals(3.0, 4000), 1, demand())
    beside = load(arrivals(3.0, 4000, output=50), 1, demand(0.002))
    assert alone.utilization == pytest.approx(0.3, rel=0.05)
    assert beside.utilization == pytest.approx(0.3 + 3 * 50 * 0.002 / max(1.0, beside.batch), rel=0.05)
    assert beside.ttft[1] > alone.ttft[1] and beside.tpot == pytest.approx(0.002 / 0.7, rel=0.05)


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

"""Policies by simulation: a runner that takes the time a machine would, on a clock of its own."""

from __future__ import annotations

import numpy as np

from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from optkit.runtime.scheduling.policy import MIN_CHUNK, LeastSlack, ttft_deadline
from optkit.runtime.types import EngineRequest, SamplingParams
from tests.support.timed_engine import LONG, SHORT, serve


def mixed(count: int, load: float) -> list[tuple[float, int]]:
    """Poisson arrivals; one in ten is long. Of the time, a share of ``load`` is needed to serve them one by one."""
    generator = np.random.default_rng(7)
    lengths = [LONG if generator.random() < 0.1 else SHORT for _ in range(count)]
    saturated = serve("fcfs", [(0.0, length) for length in lengths]).end
    gaps = generator.exponential(saturated / count / load, count)
    return list(zip(np.cumsum(gaps).tolist(), lengths, strict=True))


def test_slo_halves_the_tail_of_short_prompts_among_long_ones() -> None:
    arrivals = mixed(250, load=0.7)
    fcfs, slo = serve("fcfs", arrivals), serve("slo", arrivals)
    p95 = {run: float(np.percentile(run_.ttft[SHORT], 95)) for run, run_ in (("fcfs", fcfs), ("slo", slo))}
    assert p95["slo"] <= 0.5 * p95["fcfs"]
    assert fcfs.end / slo.end >= 0.95
    # the long ones pay, and within their bound: three times what they would take alone, give or take a step
    assert np.percentile(slo.ttft[LONG], 95) < ttft_deadline(0.7, 1.3) + 1.0


def test_slo_keeps_the_throughput_of_a_full_machine() -> None:
    burst = [(0.0, LONG if i % 10 == 0 else SHORT) for i in range(100)]
    fcfs, slo = serve("fcfs", burst), serve("slo", burst)
    assert fcfs.end / slo.end >= 0.95


def test_nobody_starves_under_a_flood_of_short_prompts() -> None:
    flood = [(0.06 * i, SHORT) for i in range(400)]  # more than can be served
    run = serve("slo", [(0.5, LONG), *flood])
    assert run.ttft[LONG][0] < 8.0
    assert len(run.ttft[SHORT]) == 400


def test_a_tpot_bound_cuts_the_chunks_while_somebody_decodes() -> None:
    cost = CostModel()
    for tokens in (1, 4, 64, 256, 512) * 4:
        cost.observe(StepWork(tokens, 1, 0.0), 6e-3 + 5.5e-4 * tokens)
    policy = LeastSlack(cost, ttft_slo_ms=700, tpot_slo_ms=80)
    alone, beside = policy.chunk_limit(StepWork(), 0), policy.chunk_limit(StepWork(8, 8, 0.0), 0)
    assert 250 < alone < 350  # a quarter of 0.7 s
    assert MIN_CHUNK <= beside < 140


def test_priority_is_worth_one_ttft_bound() -> None:
    policy = LeastSlack(CostModel(), ttft_slo_ms=700)
    params = SamplingParams(max_tokens=1)

    def rank(arrival: float, priority: int) -> float:
        r = EngineRequest(
            request_id="r", prompt_ids=(1,), sampling=params, arrival=arrival, priority=priority
        )
        return policy.rank(r, 64)

    assert rank(0.6, -1) < rank(0.0, 0) < rank(0.8, -1)

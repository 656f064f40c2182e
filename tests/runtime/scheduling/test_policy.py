"""Policies by simulation: a runner that takes the time a machine would, on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from optkit.runtime.engine import Engine
from optkit.runtime.scheduling.cost_model import CostModel, StepWork, step_work
from optkit.runtime.scheduling.policy import MIN_CHUNK, LeastSlack, promised_ttft
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineOverload, EngineRequest, SamplingParams
from tests.support.fakes import FakeRunner

SHORT, LONG, OUTPUT = 64, 1800, 32


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(FakeRunner):
    """Nothing but the passing of time: 6 ms a step, 0.55 ms a token, 0.4 ms a row, 60 ns a pair; noise of 5 %."""

    def __init__(self, clock: Clock, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=8)
        self.clock, self.noise = clock, np.random.default_rng(3)

    def execute(self, batch: Batch) -> torch.Tensor:
        shape = step_work(batch.items)
        seconds = 6e-3 + 5.5e-4 * shape.tokens + 4e-4 * shape.rows + 6e-8 * shape.pairs
        self.clock.now += seconds * (1 + 0.05 * self.noise.uniform(-1, 1))
        return torch.zeros(shape.rows, self.vocab_size)


@dataclass
class Run:
    """TTFT of each request by its prompt length, and when the last one ended. Seconds."""

    ttft: dict[int, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})
    refused: int = 0
    end: float = 0.0


def engine(policy: str, clock: Clock, **options: object) -> Engine:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 2048, "block_size": 32}
    config = SchedulerConfig(
        **limits
        | {"num_blocks": 1024, "scheduling_policy": policy, "ttft_slo_ms": 700, "prefill_target_tokens": 256}
        | options
    )
    return Engine(TimedRunner(clock, config.num_blocks, config.block_size), config, clock=clock)


def serve(policy: str, arrivals: list[tuple[float, int]], **options: object) -> Run:
    """Prompts of random tokens, arriving at their times."""
    clock, run = Clock(), Run()
    e, generator = engine(policy, clock, **options), np.random.default_rng(1)
    waiting = [
        (int(generator.integers(1 << 30)), at, length) for at, length in sorted(arrivals, key=lambda a: a[0])
    ]
    sent: dict[str, tuple[float, int]] = {}
    while waiting or e.has_work:
        if waiting and not e.has_work:
            clock.now = max(clock.now, waiting[0][1])
        while waiting and waiting[0][1] <= clock.now:
            seed, at, length = waiting.pop(0)
            ids = tuple(np.random.default_rng(seed).integers(0, 8, length).tolist())
            params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
            sent[str(seed)] = at, length
            try:
                e.add_request(
                    EngineRequest(request_id=str(seed), prompt_ids=ids, sampling=params, arrival=at)
                )
            except EngineOverload:
                run.refused += 1
        for out in e.step():
            if out.first:
                at, length = sent[out.request_id]
                run.ttft[length].append(clock.now - at)
                parts = out.first
                total = parts.before_queue + parts.queue + parts.prefill + parts.chunk_wait
                assert total == pytest.approx(clock.now - at)
    run.end = clock.now
    return run


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
    assert np.percentile(slo.ttft[LONG], 95) < promised_ttft(0.7, 1.3) + 1.0


def test_slo_keeps_the_throughput_of_a_full_machine() -> None:
    burst = [(0.0, LONG if i % 10 == 0 else SHORT) for i in range(100)]
    fcfs, slo = serve("fcfs", burst), serve("slo", burst)
    assert fcfs.end / slo.end >= 0.95


def test_nobody_starves_under_a_flood_of_short_prompts() -> None:
    flood = [(0.06 * i, SHORT) for i in range(400)]  # more than can be served
    run = serve("slo", [(0.5, LONG), *flood])
    assert run.ttft[LONG][0] < 8.0
    assert len(run.ttft[SHORT]) == 400


def test_enforcing_the_promise_refuses_early_and_keeps_it_for_the_rest() -> None:
    flood = [(0.03 * i, SHORT) for i in range(300)]
    free = serve("slo", flood)
    kept = serve("slo", flood, enforce_ttft_slo=True)
    assert kept.refused > 50
    assert np.percentile(free.ttft[SHORT], 95) > 2.0
    assert np.percentile(kept.ttft[SHORT], 95) < 0.7 * 1.5


def test_a_tpot_promise_cuts_the_chunks_while_somebody_decodes() -> None:
    cost = CostModel()
    for tokens in (1, 4, 64, 256, 512) * 4:
        cost.observe(StepWork(tokens, 1, 0.0), 6e-3 + 5.5e-4 * tokens)
    policy = LeastSlack(cost, ttft_slo_ms=700, tpot_slo_ms=80)
    alone, beside = policy.chunk_limit(StepWork(), 0), policy.chunk_limit(StepWork(8, 8, 0.0), 0)
    assert 250 < alone < 350  # a quarter of 0.7 s
    assert MIN_CHUNK <= beside < 140


def test_priority_is_worth_one_promise() -> None:
    policy = LeastSlack(CostModel(), ttft_slo_ms=700)
    params = SamplingParams(max_tokens=1)

    def rank(arrival: float, priority: int) -> float:
        r = EngineRequest(
            request_id="r", prompt_ids=(1,), sampling=params, arrival=arrival, priority=priority
        )
        return policy.rank(r, 64)

    assert rank(0.6, -1) < rank(0.0, 0) < rank(0.8, -1)

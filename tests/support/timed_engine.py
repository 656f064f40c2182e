"""An engine whose steps take the time that a clock of the test says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from optkit.runtime.engine import Engine
from optkit.runtime.scheduling.cost_model import step_work
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

    def execute(self, batch: Batch) -> np.ndarray:
        shape = step_work(batch.items)
        seconds = 6e-3 + 5.5e-4 * shape.tokens + 4e-4 * shape.rows + 6e-8 * shape.pairs
        self.clock.now += seconds * (1 + 0.05 * self.noise.uniform(-1, 1))
        return np.zeros((shape.rows, self.vocab_size), dtype=np.float32)


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

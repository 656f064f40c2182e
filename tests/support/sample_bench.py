"""Benchmark results for tests: made in milliseconds, with known latencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optkit.bench.metrics import LatencyBounds
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.workload import WorkloadConfig

ENVIRONMENT: dict[str, Any] = {
    "time": "2026-11-23T12:00:00+00:00",
    "command": ["optkit", "bench", "artifact"],
    "optkit": "0.1.0",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "platform": "Linux",
    "cpu": "a processor",
    "isa": ["avx2", "fma"],
    "cores": 2,
    "memory_bytes": 8_000_000_000,
    "load_average": 0.1,
    "threads_env": {},
    "isa_env": {},
}
PARTS = {"before_queue": 0.002, "queue": 0.01, "prefill": 0.1, "chunk_wait": 0.0}


def record(
    index: int, ttft: float, tpot: float = 0.01, tokens: int = 5, prompt: int = 512, **changes: Any
) -> RequestRecord:
    """A request with these latencies in seconds."""
    send = 100.0 + index
    times = [send + ttft + tpot * i for i in range(tokens)]
    fields: dict[str, Any] = {
        "index": index,
        "send": send,
        "scheduled": send,
        "headers": send + ttft,
        "chunks": [Chunk(time, 1) for time in times],
        "done": times[-1],
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "ttft_details": None if "ttft_details" not in changes else changes.pop("ttft_details"),
    }
    return RequestRecord(**(fields | changes))


def bench_result(
    sides: dict[str, Sequence[Sequence[RequestRecord]]] | None = None,
    config: WorkloadConfig | None = None,
    slo: LatencyBounds | None = None,
    **environment: Any,
) -> BenchResult:
    """A result with the records of each round by side; by default ``optkit`` in 0.2 s against ``baseline`` in 1 s."""
    given = sides or {
        "optkit": [[record(i, 0.2 + 0.001 * i, ttft_details=PARTS) for i in range(3)] for _ in range(2)],
        "baseline": [[record(i, 1.0 + 0.01 * i, tpot=0.05) for i in range(3)] for _ in range(2)],
    }
    turns = [
        Turn(side, number, 0.5, list(rounds[number]), [])
        for number in range(len(next(iter(given.values()))))
        for side, rounds in given.items()
    ]
    config = config or WorkloadConfig(num_prompts=3)
    return BenchResult(
        config, list(given), turns, slo or LatencyBounds(), "optkit", ENVIRONMENT | environment
    )

"""Benchmarks of two sides with given latencies, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.workload import WorkloadConfig


def record(index: int, ttft: float, tpot: float = 0.1, send: float = 0.0, tokens: int = 3) -> RequestRecord:
    """A finished request with an exact TTFT and TPOT in seconds."""
    times = [send + ttft + tpot * i for i in range(tokens)]
    chunks = [Chunk(t, 1) for t in times]
    return RequestRecord(index, send, send, send, chunks, times[-1], 8, tokens)


def broken(index: int) -> RequestRecord:
    """A request that failed at once."""
    return RequestRecord(index, 0.0, 0.0, error="HTTP 500")


Seconds = Callable[[str, int, int], float]  # of a side, a round and a prompt


def result_of(
    rounds: int,
    requests: int,
    ttft: Seconds,
    sides: Sequence[str] = ("a", "b"),
    tpot: Seconds = lambda side, round_, index: 0.1,
    **more: Any,
) -> BenchResult:
    """A benchmark with given latencies; request i of a round is sent at second 10 i."""

    def records(side: str, r: int) -> list[RequestRecord]:
        return [
            record(i, ttft(side, r, i), tpot(side, r, i), send=100.0 * r + 10.0 * i) for i in range(requests)
        ]

    turns = [Turn(side, r, 0.0, records(side, r), []) for r in range(rounds) for side in sides]
    return BenchResult(WorkloadConfig(num_prompts=requests), list(sides), turns, **more)

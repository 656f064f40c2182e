"""A saved benchmark of two sides, a and b, over three rounds."""

from __future__ import annotations

from optkit.bench.metrics import LatencyBounds
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.result import BenchResult, Turn
from optkit.bench.workload import WorkloadConfig

CONFIG = WorkloadConfig(num_prompts=2, input_len=6, output_len=3)


def turn(side, round_, ttft):
    """A turn with a single request: first token after ``ttft`` seconds, a second token 0.1 s later."""
    chunks = [Chunk(ttft, 1), Chunk(ttft + 0.1, 1)]
    record = RequestRecord(0, send=0.0, chunks=chunks, done=ttft + 0.1, output_tokens=2)
    return Turn(side, round_, 0.5, [record], [])


def made():
    """The benchmark: side b takes twice, three times and four times as long as side a."""
    turns = [
        turn(side, i, t)
        for i, pair in enumerate([(1, 2), (2, 6), (3, 12)])
        for side, t in zip("ab", pair, strict=True)
    ]
    return BenchResult(CONFIG, ["a", "b"], turns, LatencyBounds(ttft=2500), environment={"cpu": "x"})

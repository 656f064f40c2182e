"""Times of calls on a GPU without the host's share: replays of a captured graph of several calls.

Inputs rotate among sets of several times the L2 cache in total, so each call reads from memory, as in a model. On a
CPU (for trials without a GPU) calls are timed by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROTATED_BYTES = 256 << 20  # several times the L2 of an H100 or H200 (50 and 60 MB)
MAX_SETS = 16
ROUNDS, HOST_ROUNDS = 15, 2


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of seconds, in microseconds."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"us": median * 1e6, "q1_us": q1 * 1e6, "q3_us": q3 * 1e6}


def sets_for(num_bytes: int, device: torch.device) -> int:
    """Number of input sets for the rotation."""
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_SETS, -(-ROTATED_BYTES // max(num_bytes, 1))))


def timed(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = ROUNDS) -> list[float]:
    """Seconds of a call, ``rounds`` times: each round runs all of ``calls``."""
    if device.type != "cuda":
        return [on_host(calls) for _ in range(HOST_ROUNDS)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [seconds / len(calls) for seconds in replays(graph.replay, rounds)]


def replays(replay: Callable[[], None], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each of ``rounds`` replays, by events around each, after two uncounted replays."""
    if not torch.cuda.is_available():
        return [on_host([replay]) for _ in range(rounds)]
    replay()
    replay()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in pairs:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def on_host(calls: Sequence[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)

"""Requests on the simulated server of ``optkit.simulation``, with steps predicted by a plan.

Chunks, mixed steps, places and KV blocks are those of the scheduler, so a prediction for several clients follows from
the predictions of steps alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.bench.records import RequestRecord
from optkit.bench.workload import BenchRequest
from optkit.graph.shapes import Point
from optkit.plan.steps import Step
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import ScheduledRequest
from optkit.simulation.simulator import simulate


@dataclass(frozen=True)
class Arrival:
    """A request: seconds after the start, tokens in and out."""

    seconds: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Served:
    """The times of a request in seconds: to the first token, and for each later token."""

    ttft: float
    tpot: float
    end: float


@dataclass(frozen=True)
class PredictedSteps:
    """``Costs`` of a simulation, with ``seconds`` of a step."""

    seconds: Callable[[Step], float]

    def step(self, items: Sequence[ScheduledRequest]) -> float:
        return self.seconds(step_of(items))

    def alone(self, tokens: int, context: int) -> float:
        return self.seconds((Point(tokens, 1, context + tokens),))


def serve(
    config: SchedulerConfig, seconds: Callable[[Step], float], arrivals: Sequence[Arrival]
) -> list[Served]:
    """The predicted times of each of ``arrivals``, in their order, with ``seconds`` of a step."""
    requests = [request(index, arrival) for index, arrival in enumerate(arrivals)]
    found = simulate(config, PredictedSteps(seconds), requests)
    return [served(arrival, record) for arrival, record in zip(arrivals, found.records, strict=True)]


def request(index: int, arrival: Arrival) -> BenchRequest:
    """Request number ``index``; no two prompts share a block."""
    return BenchRequest(index, (index + 2,) * arrival.prompt, arrival.output, arrival.seconds)


def served(arrival: Arrival, record: RequestRecord) -> Served:
    """The times of a request that was answered."""
    first, last = record.chunks[0].time, record.chunks[-1].time
    return Served(first - arrival.seconds, (last - first) / max(1, arrival.output - 1), last)


def step_of(items: Sequence[ScheduledRequest]) -> Step:
    """The work of ``items``: each chunk, and the decodes at their mean context."""
    chunks = [point_of(item) for item in items if item.num_new > 1 or not item.request.num_computed]
    decodes = [i.request.num_computed + 1 for i in items if i.num_new == 1 and i.request.num_computed]
    if not decodes:
        return tuple(chunks)
    return (*chunks, Point(len(decodes), len(decodes), round(statistics.fmean(decodes))))


def point_of(item: ScheduledRequest) -> Point:
    return Point(item.num_new, 1, item.request.num_computed + item.num_new)


def clients(
    config: SchedulerConfig, seconds: Callable[[Step], float], count: int, prompt: int, output: int
) -> dict[str, Any]:
    """The predicted times of ``count`` requests that arrive at once."""
    found = serve(config, seconds, [Arrival(0.0, prompt, output)] * count)
    end = max(one.end for one in found)
    return {
        "clients": count,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_mean_seconds": statistics.fmean(one.ttft for one in found),
        "ttft_max_seconds": max(one.ttft for one in found),
        "tpot_mean_seconds": statistics.fmean(one.tpot for one in found),
        "output_tokens_per_second": count * output / end,
        "seconds": end,
    }

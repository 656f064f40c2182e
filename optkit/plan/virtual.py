"""Requests on a virtual clock: the server's own scheduler, with predicted times in the place of computed steps.

Chunks, mixed steps, places and KV blocks are those of the scheduler, so a prediction for several clients follows from
the predictions of steps alone. A step takes the predicted seconds; every sampled token is a made-up one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.graph.shapes import Point
from optkit.plan.steps import Step
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import Batch, EngineRequest, SamplingParams, ScheduledRequest

MADE_UP = 1  # the token that every step samples
STEP_LIMIT = 1_000_000  # a scheduler that makes no progress is a bug, not an endless prediction


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


def serve(
    config: SchedulerConfig, seconds: Callable[[Step], float], arrivals: Sequence[Arrival]
) -> list[Served]:
    """The predicted times of each of ``arrivals``, in their order, with ``seconds`` of a step."""
    now = 0.0
    scheduler = Scheduler(config, clock=lambda: now)
    left = sorted(range(len(arrivals)), key=lambda i: arrivals[i].seconds)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for _ in range(STEP_LIMIT):
        if not scheduler.has_work:
            if not left:
                break
            now = max(now, arrivals[left[0]].seconds)
        while left and arrivals[left[0]].seconds <= now:
            scheduler.add(request(left[0], arrivals[left[0]]))
            left.pop(0)
        batch = scheduler.schedule()
        now += seconds(step_of(batch)) if batch.items else 0.0
        results = [(MADE_UP,) if item.needs_logits else None for item in batch.items]
        for output in scheduler.update(batch, results):
            first.setdefault(output.request_id, now)
            last[output.request_id] = now
    return [served(arrival, first[str(i)], last[str(i)]) for i, arrival in enumerate(arrivals)]


def request(index: int, arrival: Arrival) -> EngineRequest:
    """Request number ``index``; no two prompts share a block."""
    prompt = (index + 2,) * arrival.prompt
    sampling = SamplingParams(max_tokens=arrival.output, temperature=0.0)
    return EngineRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling, arrival=arrival.seconds)


def served(arrival: Arrival, first: float, last: float) -> Served:
    later = max(1, arrival.output - 1)
    return Served(first - arrival.seconds, (last - first) / later, last)


def step_of(batch: Batch) -> Step:
    """The work of ``batch``: each chunk, and the decodes at their mean context."""
    chunks = [point_of(item) for item in batch.items if item.num_new > 1 or not item.request.num_computed]
    decodes = [i.request.num_computed + 1 for i in batch.items if i.num_new == 1 and i.request.num_computed]
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

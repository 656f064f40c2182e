"""Measurements on the serving engine without HTTP, in the units of ``optkit plan``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optkit.plan.virtual import Arrival
from optkit.runtime.engine import Engine
from optkit.runtime.types import EngineRequest, SamplingParams

names = itertools.count()
VOCABULARY = (100, 1000)  # tokens of prompts are drawn from this range


@dataclass(frozen=True)
class Measured:
    """The times of a request in seconds: to the first token, for each later token, the longest gap, and the end."""

    ttft: float
    tpot: float
    longest_gap: float
    end: float


def serve(engine: Engine, arrivals: Sequence[Arrival], sent: Sequence[float] | None = None) -> list[Measured]:
    """The times of ``arrivals`` on ``engine``, in their order.

    Args:
        sent: the start of each request's TTFT, where other than the arrival at the engine.
    """
    generator = np.random.default_rng(len(arrivals))
    start = time.monotonic()
    left = sorted(range(len(arrivals)), key=lambda i: arrivals[i].seconds)
    index_of: dict[str, int] = {}
    times: list[list[float]] = [[] for _ in arrivals]
    while left or engine.has_work:
        now = time.monotonic() - start
        if left and not engine.has_work:
            time.sleep(max(0.0, arrivals[left[0]].seconds - now))
        while left and arrivals[left[0]].seconds <= time.monotonic() - start:
            index = left.pop(0)
            made = request(arrivals[index], start, generator)
            index_of[made.request_id] = index
            engine.add_request(made)
        for output in engine.step():
            now = time.monotonic() - start
            times[index_of[output.request_id]] += [now] * len(output.token_ids)
    begun = sent if sent is not None else [one.seconds for one in arrivals]
    return [measured(at, tokens) for at, tokens in zip(begun, times, strict=True)]


def request(arrival: Arrival, start: float, generator: np.random.Generator) -> EngineRequest:
    prompt = tuple(int(token) for token in generator.integers(*VOCABULARY, arrival.prompt))
    sampling = SamplingParams(max_tokens=arrival.output, temperature=0.0)
    return EngineRequest(
        request_id=f"plan-{next(names)}",
        prompt_ids=prompt,
        sampling=sampling,
        arrival=start + arrival.seconds,
    )


def measured(sent: float, tokens: Sequence[float]) -> Measured:
    gaps = [after - before for before, after in itertools.pairwise(tokens)]
    later = statistics.fmean(gaps) if gaps else 0.0
    return Measured(tokens[0] - sent, later, max(gaps, default=0.0), tokens[-1])


def prefill_seconds(engine: Engine, tokens: int) -> float:
    """Time to first token of a prompt alone."""
    return serve(engine, [Arrival(0.0, tokens, 1)])[0].ttft


def decode_seconds(engine: Engine, prompt: int, output: int) -> float:
    """Seconds of a later token of a request alone."""
    return serve(engine, [Arrival(0.0, prompt, output)])[0].tpot


def wave(engine: Engine, count: int, prompt: int, output: int) -> dict[str, float]:
    """The figures of ``optkit.plan.virtual.clients`` for ``count`` simultaneous requests."""
    found = serve(engine, [Arrival(0.0, prompt, output)] * count)
    return {
        "ttft_mean_seconds": statistics.fmean(one.ttft for one in found),
        "ttft_max_seconds": max(one.ttft for one in found),
        "tpot_mean_seconds": statistics.fmean(one.tpot for one in found),
        "output_tokens_per_second": count * output / max(one.end for one in found),
    }

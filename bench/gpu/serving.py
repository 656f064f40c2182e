"""The served load, in process: clients with a request each, and arrivals at a given rate.

There is no HTTP, to measure the engine alone. A closed load keeps ``clients`` requests in flight and gives the
throughput. An open load has Poisson arrivals, independent of the engine; the result is the highest rate with the 95th
percentile of the time to first token within the bound.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.gpu.model import prompt


@dataclass(frozen=True)
class Load:
    """Clients, tokens of prompts and answers, and the number of answers."""

    clients: int = 256
    inputs: int = 512
    outputs: int = 128
    answers: int = 768
    ttft_bound: float = 0.7
    rate_answers: int = 256
    step_tokens: int = 2048
    kv_bytes: int = 64 << 30

    @property
    def longest(self) -> int:
        return self.inputs + self.outputs


class Driver:
    """Feeds an engine and records the times of tokens."""

    def __init__(self, engine: Any, load: Load, vocabulary: int) -> None:
        self.engine, self.load, self.vocabulary = engine, load, vocabulary
        self.arrivals: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.tokens = self.finished = self.added = 0

    def add(self, arrival: float) -> None:
        from optkit.runtime.types import EngineRequest, SamplingParams

        name = f"{id(self)}-{self.added}"
        ids = list(prompt(self.load.inputs, self.vocabulary))
        ids[0] = self.added % (self.vocabulary - 3) + 3  # no two begin alike, so nothing is cached
        sampling = SamplingParams(max_tokens=self.load.outputs, temperature=0.0)
        self.engine.add_request(
            EngineRequest(request_id=name, prompt_ids=tuple(ids), sampling=sampling, arrival=arrival)
        )
        self.arrivals[name] = arrival
        self.added += 1

    def step(self) -> int:
        """Run an engine step; return the number of finished answers."""
        done = 0
        for output in self.engine.step():
            if output.error:
                raise RuntimeError(output.error)
            if output.token_ids:
                self.first.setdefault(output.request_id, time.monotonic())
                self.tokens += len(output.token_ids)
            done += output.finish_reason is not None
        self.finished += done
        return done

    def ttfts(self) -> list[float]:
        return [self.first[name] - self.arrivals[name] for name in self.first]


def closed(engine: Any, load: Load, vocabulary: int) -> dict[str, Any]:
    """Output tokens a second with ``load.clients`` requests in flight, and the time to first token of each."""
    driver = Driver(engine, load, vocabulary)
    start = time.monotonic()
    for _ in range(min(load.clients, load.answers)):
        driver.add(time.monotonic())
    while driver.finished < load.answers:
        for _ in range(min(driver.step(), load.answers - driver.added)):
            driver.add(time.monotonic())
    seconds = time.monotonic() - start
    return {
        "output_tokens_per_s": driver.tokens / seconds,
        "seconds": seconds,
        "answers": driver.finished,
        **percentiles(driver.ttfts()),
    }


def at_rate(engine: Any, load: Load, vocabulary: int, rate: float) -> dict[str, Any]:
    """``load.rate_answers`` requests arriving at ``rate`` a second."""
    driver = Driver(engine, load, vocabulary)
    times = poisson(rate)
    due = time.monotonic() + next(times)
    while driver.finished < load.rate_answers:
        while driver.added < load.rate_answers and time.monotonic() >= due:
            driver.add(due)
            due += next(times)
        if engine.has_work:
            driver.step()
        else:
            time.sleep(max(0.0, due - time.monotonic()))
    return {"rate": rate, **percentiles(driver.ttfts())}


def highest_rate(
    trial: Callable[[float], dict[str, Any]], bound: float, first: float, rounds: int = 5
) -> Any:
    """Double the rate, then bisect: every trial, and the highest rate with p95 TTFT within ``bound`` seconds."""
    trials, low, high, rate = [], 0.0, 0.0, first
    for _ in range(rounds):
        trials.append(trial(rate))
        if trials[-1]["ttft_p95_ms"] <= bound * 1e3:
            low = max(low, rate)
        else:
            high = min(high or rate, rate)
        rate = (low * high) ** 0.5 if low and high else 2 * rate if low else rate / 2
    return {"highest_rate": low, "trials": trials}


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Seconds between arrivals."""
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(rate)


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
    return {"ttft_p50_ms": cuts[9] * 1e3, "ttft_p95_ms": cuts[18] * 1e3}


def serve(shape: Any, scheme: str, load: Load, target: Any, gpu: Any, dtype: Any) -> dict[str, Any]:
    """Both loads on a model, started as by ``optkit serve``."""
    from bench.gpu.model import build, sampler
    from optkit.runtime.cuda.start import gpu_engine, kv_cache_bytes, sized
    from optkit.runtime.scheduling.scheduler import SchedulerConfig

    model = build(shape, scheme, target, gpu.torch_device, dtype)
    limits = SchedulerConfig(
        max_num_seqs=load.clients, max_num_batched_tokens=max(load.step_tokens, load.clients),
        max_model_len=load.longest, block_size=32, num_blocks=2, enable_prefix_caching=False,
    )  # fmt: skip
    config = sized(model, limits, min(kv_cache_bytes(model, limits, gpu, 0.9), load.kv_bytes))
    engine = gpu_engine(model, config, gpu, sample=sampler(target, gpu.torch_device))
    row = closed(engine, load, shape.vocabulary)
    captures = engine.stats().graph_captures
    rate = row["output_tokens_per_s"] / load.outputs
    row["open"] = highest_rate(
        lambda r: at_rate(engine, load, shape.vocabulary, r), load.ttft_bound, rate / 2
    )
    stats = engine.stats()
    row |= {"captures_after_warm_up": stats.graph_captures - captures, "kv_blocks": config.num_blocks}
    return row | {"graph_replays": stats.graph_replays, "eager_steps": stats.eager_steps}

"""Load of the ablation: mixes of requests, and arrivals with a rate that changes in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optkit.bench.metrics import LatencyBounds
from optkit.bench.workload import BenchRequest
from optkit.plan.virtual import Arrival, request

Lengths = tuple[np.ndarray, np.ndarray]  # tokens of the prompts, and of the answers
Draw = Callable[[np.random.Generator, int], Lengths]
SHORTEST, LONGEST = 16, 1900  # tokens of a prompt
LONG_SHARE = 0.1  # of the prompts of ``mixed``


@dataclass(frozen=True)
class Mix:
    """Requests of a kind, with bounds in milliseconds on TTFT and TPOT."""

    name: str
    bounds: LatencyBounds
    draw: Draw

    @property
    def ttft_ms(self) -> float:
        assert self.bounds.ttft is not None
        return self.bounds.ttft

    @property
    def tpot_ms(self) -> float:
        assert self.bounds.tpot is not None
        return self.bounds.tpot

    def requests(self, arrivals: Sequence[float], seed: int) -> list[BenchRequest]:
        """A request for each of ``arrivals``, seconds after the start; no two prompts share a block."""
        prompts, answers = self.draw(np.random.default_rng([seed, 1]), len(arrivals))
        rows = zip(arrivals, prompts.tolist(), answers.tolist(), strict=True)
        return [request(index, Arrival(*row)) for index, row in enumerate(rows)]


def lognormal(
    generator: np.random.Generator, median: float, spread: float, least: int, most: int, count: int
) -> np.ndarray:
    """``count`` lengths in tokens around ``median``, between ``least`` and ``most``."""
    drawn = generator.lognormal(np.log(median), spread, count)
    return np.clip(drawn, least, most).astype(int)


def chat(generator: np.random.Generator, count: int) -> Lengths:
    prompts = lognormal(generator, 350, 0.8, SHORTEST, LONGEST, count)
    return prompts, lognormal(generator, 60, 0.6, 4, 256, count)


def mixed(generator: np.random.Generator, count: int) -> Lengths:
    prompts = np.where(generator.random(count) < LONG_SHARE, 1800, 64)
    return prompts, np.full(count, 64)


def long_answers(generator: np.random.Generator, count: int) -> Lengths:
    prompts = lognormal(generator, 120, 0.6, SHORTEST, LONGEST, count)
    return prompts, lognormal(generator, 200, 0.5, 16, 500, count)


MIXES = (
    Mix("chat: 350 in, 60 out", LatencyBounds(ttft=700.0, tpot=30.0), chat),
    Mix("mixed: 64 in, a tenth 1,800, 64 out", LatencyBounds(ttft=700.0, tpot=30.0), mixed),
    Mix("answers: 120 in, 200 out", LatencyBounds(ttft=500.0, tpot=30.0), long_answers),
)


def stepped(rates: Sequence[float], seconds: float, seed: int) -> list[float]:
    """Poisson arrivals: ``seconds`` at each of ``rates`` requests a second, in turn."""
    generator = np.random.default_rng([seed, 0])
    found: list[float] = []
    for number, rate in enumerate(rates):
        at, end = number * seconds, (number + 1) * seconds
        while (at := at + float(generator.exponential(1 / rate))) < end:
            found.append(at)
    return found

"""Calibration of an artifact: the times of its steps, and what a server adds.

``fit_server`` compares requests to a running server (``ProbeRun``) with the simulation of the same requests by the
times of steps (``optkit.tune.step_times``): the rest is HTTP, the process border, the share of the cores taken from the
engine, and the speed of the machine, which changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.bench.records import RequestRecord, span
from optkit.bench.workload import BenchRequest
from optkit.errors import UserError
from optkit.simulation.pace import STEADY, Pace
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import StepCosts

if TYPE_CHECKING:
    from optkit.runtime.scheduling.config import SchedulerConfig

SCALES, FINE_SCALES = (0.5, 0.7, 1.4, 2.0), (0.85, 0.95, 1.05, 1.15)
SMALLEST = {
    "request": 2e-3,
    "prompt_token": 3e-5,
    "step": 5e-4,
    "row": 2e-4,
}  # first tries of an overhead of 0
SLOWER, FINE_SLOWER = (0.85, 0.93, 1.08, 1.18), (0.97, 0.99, 1.01, 1.03)
# Of the squared logarithm of the slowness: a level was off by 7 % from one try to the next, the machine by 15 %.
SLOWNESS_PRICE = (0.07 / 0.15) ** 2
METHOD = 2  # raised with each change of what a calibration means
GAIN = 0.01  # least relative gain of a move


@dataclass(frozen=True)
class Calibration:
    """The costs of an artifact on the machine at hand, and the pace of the machine while they were measured.

    ``seconds`` is the time of the measurements.
    """

    costs: StepCosts
    overheads: Overheads
    seconds: float
    pace: Pace = STEADY

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Calibration:
        costs = data["costs"] | {"coefficients": tuple(data["costs"]["coefficients"])}
        pace = Pace(**{name: tuple(values) for name, values in data.get("pace", {}).items()})
        return Calibration(StepCosts(**costs), Overheads(**data["overheads"]), data["seconds"], pace)


@dataclass(frozen=True)
class ProbeRun:
    """Requests to a running server, and what a client measured.

    ``clients`` without pauses, or requests at their own times where it is None.
    """

    clients: int | None
    requests: Sequence[BenchRequest]
    records: Sequence[RequestRecord]

    def simulated(
        self, config: SchedulerConfig, costs: StepCosts, overheads: Overheads | None = None
    ) -> Sequence[RequestRecord]:
        """The records of the same requests in the simulator."""
        return simulate(config, costs, self.requests, clients=self.clients, overheads=overheads).records

    @cached_property
    def measured(self) -> tuple[float, ...]:
        """The ``levels`` of what the client measured."""
        return self.levels(self.records)

    def levels(self, records: Sequence[RequestRecord]) -> tuple[float, ...]:
        """The numbers to reproduce, in seconds: median TTFT and median time per token.

        For several clients without pauses, median time per token and the length of the run. Their TTFT is left out:
        many answers end in the same step, and the next steps depend on which of the new requests arrives first.
        """
        done = [record for record in records if record.ok and record.tokens > 1]
        if not done:
            raise UserError("no request of the calibration was answered", where="calibration")
        per_token = float(np.median([_tpot(r) for r in done]))
        if self.clients is not None and self.clients > 1:
            return per_token, span(done)
        return float(np.median([_ttft(r) for r in done])), per_token


Probes = Sequence[ProbeRun]


def _error(config: SchedulerConfig, costs: StepCosts, guess: Overheads, runs: Probes, most: float) -> float:
    """Sum of squared relative errors of the simulated ``runs``; further runs are left out once it is above ``most``."""
    total = 0.0
    for run in runs:
        if total > most:
            break
        found = run.levels(run.simulated(config, costs, guess))
        total += float(np.sum((np.log(found) - np.log(run.measured)) ** 2))
    return total


def fit_server(config: SchedulerConfig, costs: StepCosts, runs: Probes) -> tuple[StepCosts, Overheads]:
    """The costs at the speed of the machine during ``runs``, and the difference between a server and the engine.

    A pattern search: the slowness of the machine and each of the four overheads in turn is scaled and the runs are
    simulated again, as long as the numbers of ``ProbeRun.levels`` come closer to the measured values, by relative
    errors. The machine changes little between the measured steps and the runs, so a change has a price
    (``SLOWNESS_PRICE``): without it, faster steps and larger overheads explain the same numbers. The start are two
    lines: excess time per token over clients, and excess TTFT of a single client over its prompt.
    """
    slowness, best, least = 1.0, _lines(config, costs, runs), math.inf
    tried: set[tuple[float, Overheads]] = set()

    def error(slowness: float, guess: Overheads) -> float:
        """The error of a guess; infinite for a guess that was tried, since ``least`` only falls."""
        if (slowness, guess) in tried:
            return math.inf
        tried.add((slowness, guess))
        price = SLOWNESS_PRICE * math.log(slowness) ** 2
        return price + _error(config, costs.scaled(slowness), guess, runs, least - price)

    least = error(slowness, best)
    for factors in (SCALES, SCALES, FINE_SCALES, FINE_SCALES):
        before = least
        for factor in SLOWER if factors is SCALES else FINE_SLOWER:
            if (rest := error(factor * slowness, best)) < least * (1 - GAIN):
                slowness, least = factor * slowness, rest
        for name, smallest in SMALLEST.items():
            base = getattr(best, name)
            for value in {0.0, smallest, *(factor * base for factor in factors)}:
                guess = replace(best, **{name: value})
                if (rest := error(slowness, guess)) < least * (1 - GAIN):
                    best, least = guess, rest
        if factors is FINE_SCALES and least == before:
            break
    return costs.scaled(slowness), best


def _lines(config: SchedulerConfig, costs: StepCosts, runs: Probes) -> Overheads:
    """A first guess: time per token is over the simulation by a + b * clients, TTFT by c + d * prompt tokens."""
    gaps, firsts = list[tuple[float, float]](), list[tuple[float, float]]()
    for run in runs:
        if run.clients is None:
            continue
        known = run.simulated(config, costs)
        pairs = [(a, b) for a, b in zip(run.records, known, strict=True) if a.ok and b.ok]
        excess = [_tpot(a) - _tpot(b) for a, b in pairs if a.tokens > 1]
        if excess:
            gaps.append((float(run.clients), float(np.median(excess))))
        if run.clients == 1:
            firsts += [(float(len(run.requests[a.index].prompt_ids)), _ttft(a) - _ttft(b)) for a, b in pairs]
    step, row = _line(gaps)
    request, prompt_token = _line(_medians(firsts))
    return Overheads(max(request - step - row, 0.0), prompt_token, step, row)


def _tpot(record: RequestRecord) -> float:
    assert record.done is not None and record.first_token is not None
    return (record.done - record.first_token) / (record.tokens - 1)


def _ttft(record: RequestRecord) -> float:
    assert record.first_token is not None
    return record.first_token - record.send


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """For each x the median of all y."""
    return [
        (x, float(np.median([y for other, y in points if other == x])))
        for x in sorted({x for x, _ in points})
    ]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least squares line with neither below 0; zeros without points."""
    if not points:
        return 0.0, 0.0
    x, y = (np.array(values) for values in zip(*points, strict=True))
    best, least = (0.0, 0.0), float(np.sum(y**2))
    options = [(max(float(y.mean()), 0.0), 0.0), (0.0, max(float(x @ y / (x @ x)), 0.0))]
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(x, y, 1)
        if slope >= 0 and intercept >= 0:
            options.append((float(intercept), float(slope)))
    for a, b in options:
        rest = float(np.sum((a + b * x - y) ** 2))
        if rest < least - 1e-18:
            best, least = (a, b), rest
    return best

"""Load against latency: the highest rate within a promise, and a sweep from a single client to saturation.

``find_rate`` doubles the rate until the promise breaks, then bisects. All probes have the same arrivals, stretched
(common random numbers), and fresh prompts, so probes differ in the rate alone. A probe with a queue of positive slope
at 95 % breaks the promise, whatever the latencies: a longer run would have been later.

``sweep`` measures single requests in turn, then all at once, then rates between the two throughputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from optkit.bench import workload
from optkit.bench.assertions import Claim
from optkit.bench.environment import busy
from optkit.bench.metrics import LatencyBounds
from optkit.bench.result import BenchResult
from optkit.bench.run import RunningSide, Session
from optkit.bench.validity import grows, measuring_doubts, queue_of, sample_doubts
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.machine.paths import save_text

PROBES = 7
SYNCHRONOUS = 8  # requests of the first measurement, one at a time
PRECISION = 1.05  # stop where the held and the broken rate are so near
SCHEMA = 1


@dataclass(frozen=True)
class Promise:
    """The bounds of a probe: on each p95, or claims that have to be held with their confidence."""

    slo: LatencyBounds = field(default_factory=LatencyBounds)
    claims: tuple[Claim, ...] = ()

    def check(self, requests: int) -> None:
        """Refuse a claim that no probe can show: each is a single round of ``requests`` requests.

        Raises:
            UserError: with the reason.
        """
        for claim in self.claims:
            if reason := claim.too_few(requests, 1):
                fix = "add --num-prompts, or claim a percentile, as in 'ttft_p95<700ms'"
                what = f"each rate is tried in a single round of {requests} requests: {reason}"
                raise UserError(what, where=f"--assert {claim.text}", fix=fix)

    def broken(self, result: BenchResult) -> list[str]:
        """Reasons against the rate of a probe, a line each; empty where the promise is held."""
        reasons = list(result.slo_misses())
        reasons += [found.line() for claim in self.claims if not (found := claim.check(result)).held]
        if any(grows(queue_of(turn)) for turn in result.turns):
            reasons.append("the queue grows: its slope is positive at 95 %")
        return reasons


@dataclass(frozen=True)
class Probe:
    """A tried rate. ``reasons`` are empty where the promise was held."""

    rate: float
    result: BenchResult
    reasons: tuple[str, ...]

    @property
    def held(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "held": self.held,
            "reasons": list(self.reasons),
            "result": self.result.to_dict(),
        }


@dataclass(frozen=True)
class FoundRate:
    """The end of a search.

    Attributes:
        side: name of the measured side.
        probes: in the order of trying.
    """

    side: str
    probes: tuple[Probe, ...]
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def highest(self) -> float | None:
        """The highest rate within the promise, below every broken rate; None where all rates broke the promise."""
        limit = self.lowest_broken or math.inf
        return max((p.rate for p in self.probes if p.held and p.rate < limit), default=None)

    @property
    def lowest_broken(self) -> float | None:
        """The lowest broken rate; None where no rate broke the promise."""
        return min((p.rate for p in self.probes if not p.held), default=None)

    def line(self) -> str:
        """``optkit: 3.2 requests/s hold, 3.4 do not (p95 ttft 812.0 ms > 700 ms)``"""
        broken = self.lowest_broken
        reason = next((p.reasons[0] for p in self.probes if p.rate == broken), "")
        if self.highest is None:
            return f"{self.side}: no rate holds, not even {broken:.3g} requests/s ({reason})"
        upper = f"{broken:.3g} do not ({reason})" if broken else "no higher rate was tried"
        return f"{self.side}: {self.highest:.3g} requests/s hold, {upper}"

    def doubts(self) -> list[str]:
        """Reasons against trusting the probes, each once."""
        few = [doubt for probe in self.probes[:1] for doubt in sample_doubts(probe.result)]
        return [*_doubts(self.environment, [probe.result for probe in self.probes]), *few]

    def to_dict(self) -> dict[str, Any]:
        """The rates with the raw records of each probe, as JSON data."""
        return {
            "schema": SCHEMA,
            "kind": "find-rate",
            "environment": self.environment,
            "doubts": self.doubts(),
            "side": self.side,
            "highest_rate": self.highest,
            "lowest_broken_rate": self.lowest_broken,
            "probes": [probe.to_dict() for probe in self.probes],
        }

    def save(self, path: Path) -> None:
        save_text(path, json.dumps(self.to_dict(), indent=1) + "\n")


def search(hold: Callable[[float], bool], start: float, probes: int = PROBES) -> list[float]:
    """Try rates: double (or halve) from ``start`` until the answer changes, then bisect; geometric means.

    Args:
        hold: True where a rate holds the promise.
        start: the first rate.
        probes: the most rates to try.

    Returns:
        The rates in the order of trying.
    """
    tried: list[float] = []
    held, broken = 0.0, math.inf
    rate = start
    while len(tried) < probes and not held * PRECISION >= broken:
        tried.append(rate)
        held, broken = (max(held, rate), broken) if hold(rate) else (held, min(broken, rate))
        if not held:
            rate = broken / 2
        elif math.isinf(broken):
            rate = held * 2
        else:
            rate = math.sqrt(held * broken)
    return tried


def find_rate(
    session: Session,
    config: WorkloadConfig,
    promise: Promise,
    start: float | None = None,
    probes: int = PROBES,
) -> FoundRate:
    """The highest rate of the session's first side within ``promise``.

    Args:
        session: running servers; the first side is measured.
        config: the requests; arrivals are replaced at each rate.
        promise: bounds or claims.
        start: the first rate; by default the throughput of single requests in turn.
        probes: the most rates to try.

    Raises:
        UserError: a claim needs more requests or rounds than a probe has.
    """
    promise.check(config.num_prompts)
    side = session.sides[0]
    if start is None:
        start = _throughput(_one(session, side, synchronous(config), 0, promise))
    found: list[Probe] = []

    def hold(rate: float) -> bool:
        session.progress(f"{side.name}: probe {len(found) + 1} of {probes}, {rate:.3g} requests/s")
        result = _one(session, side, config.at_rate(rate), len(found) + 1, promise)
        found.append(Probe(rate, result, tuple(promise.broken(result))))
        return found[-1].held

    search(hold, start, probes)
    return FoundRate(side.name, tuple(found), session.environment)


def _one(
    session: Session, side: RunningSide, config: WorkloadConfig, number: int, promise: Promise
) -> BenchResult:
    """A result of a single turn: fresh prompts by ``number``, the arrivals of round 0."""
    turn = side.turn(number, workload.build(config, session.ids, number, 0))
    return BenchResult(config, [side.name], [turn], promise.slo, environment={})


def synchronous(config: WorkloadConfig, most: int = SYNCHRONOUS) -> WorkloadConfig:
    """The requests in turn: ``most``, or the fewest whole conversations above."""
    count = min(config.num_prompts, -(-most // config.turns) * config.turns)
    return replace(config.closed(1), num_prompts=count)


def _throughput(result: BenchResult) -> float:
    """Finished requests per second of a result's only side.

    Raises:
        UserError: no request was answered.
    """
    rates = [row["request_throughput"] for row in result.rounds(result.sides[0])]
    if not min(rates, default=0.0):
        reason = next(iter(result.problems()), "no request was answered")
        fix = "try the side alone, with a single client (--max-concurrency 1)"
        raise UserError(f"no rate to start from: {reason}", where=result.sides[0], fix=fix)
    return float(np.median(rates))


# -- sweep ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """All sides at a load. ``rate`` is None for single requests in turn, and infinite for all at once."""

    rate: float | None
    result: BenchResult

    @property
    def label(self) -> str:
        if self.rate is None:
            return "synchronous"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:.3g}/s"


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep in the order of their load."""

    sides: tuple[str, ...]
    points: tuple[SweepPoint, ...]
    environment: dict[str, Any] = field(default_factory=dict)

    def doubts(self) -> list[str]:
        """Reasons against trusting the points, each once."""
        return _doubts(self.environment, [point.result for point in self.points])

    def to_dict(self) -> dict[str, Any]:
        """The points with raw records, as JSON data; the rates of both ends are null."""
        rows = [
            {
                "label": point.label,
                "rate": point.rate if point.rate and math.isfinite(point.rate) else None,
                "result": point.result.to_dict(),
            }
            for point in self.points
        ]
        head = {"schema": SCHEMA, "kind": "sweep", "environment": self.environment, "doubts": self.doubts()}
        return head | {"sides": list(self.sides), "points": rows}

    def save(self, path: Path) -> None:
        save_text(path, json.dumps(self.to_dict(), indent=1) + "\n")


def sweep(
    session: Session, config: WorkloadConfig, slo: LatencyBounds, rounds: int = 1, rates: int = 5
) -> Sweep:
    """Measure all sides with requests in turn, all at once, and at ``rates`` rates between, evenly spaced.

    Args:
        session: running servers.
        config: the requests; arrivals are replaced.
        slo: bounds for goodput.
        rounds: rounds of each load.
        rates: number of rates between the lowest synchronous and the highest saturated throughput.
    """
    numbers = iter(range(1 << 30))
    first = _point(session, synchronous(config), None, slo, rounds, numbers)
    last = _point(session, config.closed(None), math.inf, slo, rounds, numbers)
    slowest = min(_rates(first.result))
    fastest = max(_rates(last.result))
    between = np.linspace(slowest, max(fastest, slowest), rates)
    points = [
        _point(session, config.at_rate(float(rate)), float(rate), slo, rounds, numbers) for rate in between
    ]
    return Sweep(tuple(side.name for side in session.sides), (first, *points, last), session.environment)


def _rates(result: BenchResult) -> list[float]:
    """The throughput of each side that answers, in requests per second.

    Raises:
        UserError: no side answered a request in each round.
    """
    found, reasons = list[float](), list[UserError]()
    for side in result.sides:
        turns = [turn for turn in result.turns if turn.side == side]
        try:
            found.append(_throughput(BenchResult(result.config, [side], turns)))
        except UserError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def _point(
    session: Session,
    config: WorkloadConfig,
    rate: float | None,
    slo: LatencyBounds,
    rounds: int,
    numbers: Iterator[int],
) -> SweepPoint:
    """All sides at a load; each round has fresh prompts, and each load the same arrivals."""
    names = [side.name for side in session.sides]
    result = BenchResult(config, names, [], slo, environment={})
    point = SweepPoint(rate, result)
    for round_ in range(rounds):
        load = workload.build(config, session.ids, next(numbers), round_)
        for side in session.in_turn(round_):
            session.progress(f"{point.label}, round {round_ + 1} of {rounds}: {side.name}")
            result.turns.append(side.turn(round_, load))
    return point


def _doubts(environment: dict[str, Any], results: Sequence[BenchResult]) -> list[str]:
    """Doubts about machine, clients and caches; a growing queue is a finding here, and not a doubt."""
    warning = busy(environment)
    found = [doubt for result in results for doubt in measuring_doubts(result)]
    return list(dict.fromkeys([warning, *found] if warning else found))

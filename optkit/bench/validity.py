"""Reasons against trusting a result, checked on every run: a record, and a line for each doubt.

==================  ====================================================================================
check               doubt
==================  ====================================================================================
machine             other processes used more than a quarter before the run
client              a core of its own nearly used up, or events read late
cache               hits of the server's prefix cache where prompts share no prefixes
steady state        latencies drift by more than a tenth from the first to the last requests
queue               an open loop with a growing queue: latencies depend on the length of the run
sample size         a bound on a p95 with fewer requests than show it
==================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from optkit.bench.client_load import ClientLoad
from optkit.bench.environment import busy
from optkit.bench.metrics import OPTKIT, percentile
from optkit.bench.records import RequestRecord
from optkit.bench.server_counters import CacheCounters
from optkit.bench.statistics import Trend, misses_allowed, queue_trend, samples_needed, trend

if TYPE_CHECKING:
    from optkit.bench.result import BenchResult, Turn

DRIFT = 0.1  # of the mean latency, from the first to the last block
SURE = 0.99  # confidence of a drift: several are looked at in each run
DRIFTING = ("ttft", "tpot")


@dataclass(frozen=True)
class TurnConditions:
    """The conditions of a turn beside the load average before the turn.

    Attributes:
        load_after: the 1-minute load average after the turn.
        client: the load generator's own load.
        cache: prompt tokens looked up and found in the server's prefix cache; None where the server does not say.
    """

    load_after: float
    client: ClientLoad
    cache: CacheCounters | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TurnConditions:
        cache = data["cache"]
        return cls(
            data["load_after"], ClientLoad(**data["client"]), CacheCounters(**cache) if cache else None
        )


@dataclass(frozen=True)
class Validity:
    """The checks of a run: ``record`` for the JSON file, ``doubts`` for people."""

    record: dict[str, Any]
    doubts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"trusted": not self.doubts, "doubts": list(self.doubts), **self.record}


def validity(result: BenchResult) -> Validity:
    """Check a result."""
    warning = busy(result.environment)
    sides = {side: _Side(result, side) for side in result.sides}
    doubts = [warning] if warning else []
    doubts += [f"{name}: {doubt}" for name, side in sides.items() for doubt in side.doubts()]
    return Validity({"sides": {name: side.record() for name, side in sides.items()}}, tuple(doubts))


def measuring_doubts(result: BenchResult) -> list[str]:
    """The doubts about clients and caches alone, which hold at any load."""
    return [f"{name}: {doubt}" for name in result.sides for doubt in _Side(result, name).measuring()]


def sample_doubts(result: BenchResult) -> list[str]:
    """The doubts about too few requests for the bounds on a p95."""
    return [f"{name}: {doubt}" for name in result.sides for doubt in _Side(result, name).samples()]


class _Side:
    """The checks of a side."""

    def __init__(self, result: BenchResult, name: str) -> None:
        self.result = result
        self.turns: list[Turn] = [turn for turn in result.turns if turn.side == name]
        self.records = [record for turn in self.turns for record in turn.records if record.ok]
        self.conditions = [turn.conditions for turn in self.turns if turn.conditions]
        self.ttft_ms = percentile([1e3 * s for r in self.records for s in OPTKIT["ttft"].samples(r)], 50)
        self.drifts = {} if result.config.trace else {name: drift(self.records, name) for name in DRIFTING}

    def record(self) -> dict[str, Any]:
        clients = [found.client for found in self.conditions]
        caches = [found.cache for found in self.conditions if found.cache]
        queries = sum(found.queries for found in caches)
        return {
            "requests": len(self.records),
            "p95_shown": misses_allowed(len(self.records), 95) is not None,
            "p99_shown": misses_allowed(len(self.records), 99) is not None,
            "client_cpu_share": max((c.cpu_share for c in clients), default=None),
            "client_lag_p95_ms": max((c.lag_p95_ms for c in clients), default=None),
            "load_average_before": [turn.load_average for turn in self.turns],
            "load_average_after": [found.load_after for found in self.conditions],
            "cache_hit_share": sum(found.hits for found in caches) / queries if queries else None,
            "drift": {name: asdict(found) if found else None for name, found in self.drifts.items()},
            "queue_growth": [found.growth if found else None for found in map(queue_of, self.turns)],
        }

    def doubts(self) -> Iterator[str]:
        yield from self.measuring()
        yield from self._steady()
        yield from self.samples()

    def measuring(self) -> Iterator[str]:
        yield from self._client()
        yield from self._cache()

    def _client(self) -> Iterator[str]:
        found = [warning for c in self.conditions if (warning := c.client.warning(self.ttft_ms))]
        if found:
            yield found[0] + (f" (and in {len(found) - 1} further rounds)" if len(found) > 1 else "")

    def _cache(self) -> Iterator[str]:
        hits = sum(found.cache.hits for found in self.conditions if found.cache)
        if hits and not self.result.config.shares_prefixes:
            yield f"{hits:.0f} prompt tokens came from the server's prefix cache: no other client may use the server"

    def _steady(self) -> Iterator[str]:
        for name, found in self.drifts.items():
            if found and drifted(found):
                yield (
                    f"not steady: {name} went from {1e3 * found.first:.3g} to {1e3 * found.last:.3g} ms over the run"
                )
        if self.result.config.open_loop:
            growing = [turn.round + 1 for turn in self.turns if grows(queue_of(turn))]
            if growing:
                rounds = ", ".join(map(str, growing))
                yield f"the queue grew in round {rounds}: latencies above capacity depend on the run's length"

    def samples(self) -> Iterator[str]:
        if self.result.slo.bounds() and misses_allowed(len(self.records), 95) is None:
            yield (
                f"a p95 of {len(self.records)} requests shows no bound at 95 % confidence: {samples_needed(95)} needed"
            )


def drift(records: Sequence[RequestRecord], metric: str) -> Trend | None:
    """The trend of a latency in seconds over all requests of a side, in the order of sending."""
    ordered = sorted(records, key=lambda record: record.send)
    return trend([sample for record in ordered for sample in OPTKIT[metric].samples(record)])


def drifted(found: Trend) -> bool:
    """Return True for a sure drift that matters."""
    level = (found.first + found.last) / 2
    return abs(found.growth) > DRIFT * level and (found.grows(SURE) or found.falls(SURE))


def spans(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """(arrival, end) of each request; a failed request ends with its last event."""
    found = []
    for r in records:
        times = (r.send, r.headers, r.chunks[-1].time if r.chunks else None, r.done)
        found.append((r.send if r.scheduled is None else r.scheduled, max(t for t in times if t is not None)))
    return found


def queue_of(turn: Turn) -> Trend | None:
    """The trend of the queue in a turn."""
    return queue_trend(spans(turn.records))


def grows(found: Trend | None) -> bool:
    return found is not None and found.growth >= 1 and found.grows()

"""The result of a paired run: raw turns, and the medians and ratios computed from them.

The raw records are the result. All other numbers are computed on demand, so a saved file can be read under the
definitions of another tool or another SLO. The candidate is the first side. A ratio is candidate / other within a
round, then the median over rounds: drift of the machine between rounds cancels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from optkit.bench import assertions, comparison
from optkit.bench.environment import busy
from optkit.bench.metrics import DEFINITIONS, PERCENTILES, LatencyBounds, slo_misses, summarize
from optkit.bench.records import RequestRecord
from optkit.bench.statistics import shows_percentile
from optkit.bench.validity import TurnConditions, Validity, validity
from optkit.bench.workload import WorkloadConfig
from optkit.machine.paths import save_text

SCHEMA = 1
RATES = ("output_throughput", "request_throughput")
GOODPUT = ("goodput", "slo_attainment")

Key = tuple[str, ...]  # a number inside a round's summary, e.g. ("latency_ms", "ttft", "p50")


@dataclass(frozen=True)
class Turn:
    """One round of a side. ``load_average`` is taken before the round."""

    side: str
    round: int
    load_average: float
    records: list[RequestRecord]
    problems: list[str]
    conditions: TurnConditions | None = None


@dataclass
class BenchResult:
    """All records of a run. ``sides[0]`` is the candidate; ratios are candidate / other.

    ``claims`` are the texts of assertions (``optkit.bench.assertions``).
    """

    config: WorkloadConfig
    sides: list[str]
    turns: list[Turn] = field(default_factory=list)
    slo: LatencyBounds = field(default_factory=LatencyBounds)
    definitions: str = "optkit"
    environment: dict[str, Any] = field(default_factory=dict)
    claims: tuple[str, ...] = ()

    def rounds(self, side: str) -> list[dict[str, Any]]:
        """The summary of each round of ``side``, in order."""
        return [summarize(t.records, self.slo, self.definitions) for t in self.turns if t.side == side]

    def records(self, side: str) -> list[RequestRecord]:
        return [record for t in self.turns if t.side == side for record in t.records]

    def slo_misses(self) -> list[str]:
        """Bounds missed by the candidate's p95 over all rounds, one line each."""
        return slo_misses(self.records(self.sides[0]), self.slo)

    def problems(self) -> list[str]:
        """Reasons against comparing the numbers: a busy machine, wrong lengths, cache hits, failures."""
        warning = busy(self.environment)
        lines = [warning] if warning else []
        lines += [f"{t.side} round {t.round}: {line}" for t in self.turns for line in t.problems]
        for t in self.turns:
            lines += [
                f"{t.side} round {t.round}: request {r.index} failed: {r.error}"
                for r in t.records
                if not r.ok
            ]
        return lines

    def validity(self) -> Validity:
        """Reasons against trusting the numbers, with the record behind."""
        return validity(self)

    def assertions(self) -> list[assertions.Checked]:
        """The outcome of each claim."""
        return [claim.check(self) for text in self.claims for claim in assertions.parse(text)]

    def intervals(self) -> list[comparison.Ratio]:
        """The ratios of the candidate to the other sides, with intervals over rounds."""
        return comparison.ratios(self)

    def finished(self, side: str) -> int:
        """Requests of ``side`` that were answered, over all rounds."""
        return sum(record.ok for record in self.records(side))

    def shows(self, side: str, key: Key) -> bool:
        """Return False for a latency's percentile above p50 with fewer requests of ``side`` than show it.

        The requests of all rounds count, as far as they were answered (``statistics.samples_needed``).
        """
        if key[0] != "latency_ms" or not key[-1].startswith("p"):
            return True
        q = float(key[-1][1:])
        return shows_percentile(self.finished(side), q)

    def statistic(self, side: str, path: Sequence[str]) -> dict[str, float] | None:
        """Median and quartiles over rounds of a number of the summaries, e.g. ("latency_ms", "ttft", "p50")."""
        return spread([_at(summary, path) for summary in self.rounds(side)])

    def ratio(self, other: str, path: Sequence[str]) -> dict[str, float] | None:
        """Median and quartiles of candidate / other, each ratio taken within a round."""
        return spread(self.ratios(other, path))

    def ratios(self, other: str, path: Sequence[str]) -> list[float]:
        """Candidate / other of each round; empty if a round has no value."""
        pairs = zip(self.rounds(self.sides[0]), self.rounds(other), strict=True)
        found = [_divide(_at(a, path), _at(b, path)) for a, b in pairs]
        return [] if None in found else [ratio for ratio in found if ratio is not None]

    def numbers(self) -> list[Key]:
        """The compared numbers, as keys into a round's summary."""
        latencies = [("latency_ms", m, f"p{q}") for m in DEFINITIONS[self.definitions] for q in PERCENTILES]
        rates = RATES + (GOODPUT if self.slo.bounds() else ())
        return [*latencies, *((name,) for name in rates)]

    def comparison(self) -> dict[str, dict[str, Any]]:
        """{number: {side: spread, "ratio": {other: spread}}}, the data of the README's tables."""
        others = self.sides[1:]
        return {
            ".".join(key): {side: self.statistic(side, key) for side in self.sides}
            | {"ratio": {side: self.ratio(side, key) for side in others}}
            for key in self.numbers()
        }

    def to_dict(self) -> dict[str, Any]:
        """Raw records and computed numbers, as JSON data."""
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "workload": self.config.to_dict(),
            "slo_ms": self.slo.bounds(),
            "slo_misses": self.slo_misses(),
            "problems": self.problems(),
            "validity": self.validity().to_dict(),
            "assertions": [checked.to_dict() for checked in self.assertions()],
            "intervals": comparison.to_dict(self.intervals()),
            "definitions": self.definitions,
            "comparison": self.comparison(),
            "sides": {side: {"rounds": self.rounds(side)} for side in self.sides},
            "turns": [_turn_to_dict(turn) for turn in self.turns],
        }

    def save(self, path: Path) -> None:
        save_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchResult:
        """Read a saved result, for example to compute the metrics under other definitions."""
        config = WorkloadConfig.from_dict(data["workload"])
        turns = [_turn_from_dict(turn) for turn in data["turns"]]
        slo, names = LatencyBounds(**data["slo_ms"]), list(data["sides"])
        claims = tuple(checked["text"] for checked in data.get("assertions", ()))
        return cls(config, names, turns, slo, data["definitions"], data["environment"], claims)


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median and quartiles; None if a round has no value."""
    if not values or any(value is None for value in values):
        return None
    q1, median, q3 = np.percentile(np.array(values, dtype=float), (25, 50, 75))
    return {"median": float(median), "q1": float(q1), "q3": float(q3)}


def _divide(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _at(summary: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    conditions = turn.conditions.to_dict() if turn.conditions else None
    return {**vars(turn), "records": [r.to_dict() for r in turn.records], "conditions": conditions}


def _turn_from_dict(data: dict[str, Any]) -> Turn:
    records = [RequestRecord.from_dict(r) for r in data["records"]]
    conditions = data.get("conditions")
    found = TurnConditions.from_dict(conditions) if conditions else None
    return Turn(**{**data, "records": records, "conditions": found})

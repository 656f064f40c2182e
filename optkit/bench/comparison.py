"""The candidate against another side: intervals of ratios over rounds.

A ``Quantity`` is a latency's percentile or mean (``ttft_p50``, ``e2e_mean``) or a rate (``output_throughput``). The
ratio of a p50 is the median over prompts of the paired ratios; other percentiles and means are ratios of a round's
numbers. All formulas are optkit's, whatever the table shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.bench.metrics import OPTKIT, percentile, summarize
from optkit.bench.records import RequestRecord
from optkit.bench.slo import RATES
from optkit.bench.statistics import (
    Interval,
    exponential,
    log_ratios,
    mean_interval,
    misses_allowed,
    rounds_needed,
    samples_needed,
)

if TYPE_CHECKING:
    from optkit.bench.result import BenchResult


@dataclass(frozen=True)
class Quantity:
    """A number of a round: a percentile ``q`` or the mean (``q`` None) of a latency in ms, or a rate."""

    metric: str
    q: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.metric in RATES

    @property
    def name(self) -> str:
        if self.is_rate:
            return self.metric
        return f"{self.metric}_mean" if self.q is None else f"{self.metric}_p{self.q:g}"

    def samples(self, r: RequestRecord) -> list[float]:
        """The latency in ms of a finished request; empty for a failed request."""
        return [1e3 * s for s in OPTKIT[self.metric].samples(r)] if r.ok else []

    def of(self, records: Sequence[RequestRecord]) -> float | None:
        """The number over ``records``; None without a sample."""
        if self.is_rate:
            return float(summarize(records)[self.metric])
        samples = [sample for r in records for sample in self.samples(r)]
        if self.q is None:
            return float(np.mean(samples)) if samples else None
        return percentile(samples, self.q)


COMPARED = (
    *(Quantity("ttft", 50), Quantity("tpot", 50), Quantity("e2e", 50)),
    *(Quantity("ttft", 95), Quantity("output_throughput")),
)


def by_prompt(records: Sequence[RequestRecord], metric: str) -> dict[int, float]:
    """A latency in ms of each finished request, by prompt index."""
    return {r.index: sample for r in records for sample in Quantity(metric).samples(r)}


@dataclass(frozen=True)
class Ratio:
    """candidate / other. ``interval`` is None where none is shown; ``reason`` says why."""

    quantity: Quantity
    other: str
    interval: Interval | None
    reason: str = ""

    def line(self) -> str:
        """``ttft_p50: 0.27x baseline [0.26, 0.28]: lower``"""
        if self.interval is None:
            return f"{self.quantity.name}: not shown against {self.other}: {self.reason}"
        low, ratio, high = self.interval.low, self.interval.estimate, self.interval.high
        word = "lower" if high < 1 else "higher" if low > 1 else "no difference shown"
        return f"{self.quantity.name}: {ratio:.3g}x {self.other} [{low:.3g}, {high:.3g}]: {word}"

    def to_dict(self) -> dict[str, Any]:
        if self.interval is None:
            return {"not_shown": self.reason}
        found = self.interval
        numbers = {"low": found.low, "ratio": found.estimate, "high": found.high}
        return numbers | {"rounds": found.count, "confidence": found.confidence}


def ratio(result: BenchResult, other: str, of: Quantity) -> Ratio:
    """The ratio of the first side to ``other``, over rounds."""
    rounds = list(zip(_records(result, result.sides[0]), _records(result, other), strict=True))
    if reason := _too_few(result, other, of, len(rounds)):
        return Ratio(of, other, None, reason)
    logs = [_log_ratio(candidate, base, of) for candidate, base in rounds]
    if None in logs:
        return Ratio(of, other, None, "a round has no value")
    return Ratio(of, other, exponential(mean_interval([x for x in logs if x is not None])))


def ratios(result: BenchResult) -> list[Ratio]:
    """The ratios to every further side."""
    return [ratio(result, other, of) for other in result.sides[1:] for of in COMPARED]


def ratio_lines(found: Sequence[Ratio]) -> list[str]:
    """Lines for people: intervals, or one line with the reason where none is shown."""
    shown = [one.line() for one in found if one.interval is not None]
    return shown or [f"no intervals: {reason}" for reason in dict.fromkeys(one.reason for one in found)][:1]


def to_dict(found: Sequence[Ratio]) -> dict[str, dict[str, Any]]:
    """{other side: {quantity: interval}}"""
    table: dict[str, dict[str, Any]] = {}
    for one in found:
        table.setdefault(one.other, {})[one.quantity.name] = one.to_dict()
    return table


def _records(result: BenchResult, side: str) -> list[list[RequestRecord]]:
    """The records of a side by round."""
    turns: Mapping[int, list[RequestRecord]] = {t.round: t.records for t in result.turns if t.side == side}
    return [turns[round_] for round_ in sorted(turns)]


def _too_few(result: BenchResult, other: str, of: Quantity, rounds: int) -> str:
    """The reason against an interval; empty where there is none."""
    if rounds < rounds_needed():
        return f"an interval needs {rounds_needed()} rounds, {rounds} were run (--rounds {rounds_needed()})"
    if of.q is None:
        return ""
    fewest = min(sum(r.ok for r in result.records(side)) for side in (result.sides[0], other))
    if misses_allowed(fewest, max(of.q, 100 - of.q)) is None:
        return f"a p{of.q:g} needs {samples_needed(max(of.q, 100 - of.q))} requests, {fewest} finished"
    return ""


def _log_ratio(
    candidate: Sequence[RequestRecord], other: Sequence[RequestRecord], of: Quantity
) -> float | None:
    if of.q == 50:
        paired = log_ratios(by_prompt(candidate, of.metric), by_prompt(other, of.metric))
        return float(np.median(paired)) if paired else None
    a, b = of.of(candidate), of.of(other)
    return math.log(a / b) if a and b else None

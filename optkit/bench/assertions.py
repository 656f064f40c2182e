"""Claims about a run, checked at 95 % confidence: ``--assert``.

======================================  =======================================================================
claim                                   held where
======================================  =======================================================================
``ttft_p95<700ms``                      the percentile is below the bound, by order statistics
``95%:ttft<700ms,tpot<50ms``            enough requests meet all bounds at once; a failed request meets none
``output_throughput>=30``               the mean over rounds is above, with the whole interval over rounds
``ttft_p50 <= 0.5x baseline``           the whole interval of the ratio is below; rounds are resampled
======================================  =======================================================================

A claim is *held*, *failed* (the opposite is shown) or *not shown*: the requests or rounds are too few, or the
interval contains the bound. Only a held claim passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optkit.bench.comparison import ALIASES, Quantity, quantity, ratio
from optkit.bench.metrics import LatencyBounds
from optkit.bench.statistics import (
    mean_interval,
    misses_allowed,
    percentile_bounds,
    rounds_needed,
    samples_needed,
)
from optkit.errors import UserError, nearest

if TYPE_CHECKING:
    from optkit.bench.result import BenchResult

Outcome = Literal["held", "failed", "not shown"]

OPERATOR = r"\s*(?P<operator><=|>=|<|>)\s*"
NUMBER = r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*"
RELATIVE = re.compile(rf"(?P<name>\w[\w.]*){OPERATOR}{NUMBER}x\s*(?P<side>[\w.-]*)")
ABSOLUTE = re.compile(rf"(?P<name>\w[\w.]*){OPERATOR}{NUMBER}(?P<unit>ms|s|tok/s|req/s|)")
JOINT = re.compile(r"(?P<share>\d+(?:\.\d+)?)\s*%\s*:\s*(?P<bounds>.+)")
BOUND = re.compile(r"\s*(?P<metric>\w+)\s*<=?\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|)\s*")
EXAMPLES = '"ttft_p95<700ms", "95%:ttft<700ms,tpot<50ms" or "ttft_p50 <= 0.5x baseline"'


@dataclass(frozen=True)
class Checked:
    """A claim with the outcome and the numbers behind."""

    text: str
    outcome: Outcome
    detail: str

    @property
    def held(self) -> bool:
        return self.outcome == "held"

    def line(self) -> str:
        """``held: ttft_p95<700ms: below 612 ms with 95 % confidence (120 requests)``"""
        return f"{self.outcome}: {self.text}: {self.detail}"

    def to_dict(self) -> dict[str, str]:
        return {"text": self.text, "outcome": self.outcome, "detail": self.detail}


@dataclass(frozen=True)
class Percentile:
    """A bound in ms on a percentile of a latency, over all requests of all rounds."""

    text: str
    of: Quantity
    below: bool
    bound: float

    def check(self, result: BenchResult) -> Checked:
        records = result.records(result.sides[0])
        samples = [sample for r in records for sample in self.of.samples(r)]
        failed = sum(not r.ok for r in records)
        q = self.of.q or 50.0
        found = percentile_bounds(samples, q, failed)
        near, far = (found.high, found.low) if self.below else (found.low, found.high)
        counts = f"{found.count} requests" + (f", {failed} failed" if failed else "")
        if near is None:
            needed = samples_needed(max(q, 100 - q))
            return Checked(self.text, "not shown", f"{needed} requests needed, {found.count} measured")
        sure = f"with 95 % confidence ({counts})"
        here, there = ("below", "above") if self.below else ("above", "below")
        if _beyond(near, self.bound, self.below):
            return Checked(self.text, "held", f"{here} {near:.4g} ms {sure}")
        if far is not None and not _beyond(far, self.bound, self.below):
            return Checked(self.text, "failed", f"{there} {far:.4g} ms {sure}")
        return Checked(self.text, "not shown", f"{here} {near:.4g} ms {sure}")


@dataclass(frozen=True)
class Joint:
    """The share of requests within all bounds, in percent."""

    text: str
    share: float
    bounds: LatencyBounds

    def check(self, result: BenchResult) -> Checked:
        records = result.records(result.sides[0])
        misses = sum(not self.bounds.met(r) for r in records)
        allowed = misses_allowed(len(records), self.share)
        counts = f"{misses} of {len(records)} requests miss"
        if allowed is None:
            return Checked(
                self.text,
                "not shown",
                f"{samples_needed(self.share)} requests needed, {len(records)} measured",
            )
        if misses <= allowed:
            return Checked(self.text, "held", f"{counts}, {allowed} may")
        met = misses_allowed(len(records), 100 - self.share)
        if met is not None and len(records) - misses <= met:
            return Checked(self.text, "failed", f"{counts}, {allowed} may")
        return Checked(self.text, "not shown", f"{counts}, {allowed} may")


@dataclass(frozen=True)
class Mean:
    """A bound on a rate, or on a mean latency, over rounds."""

    text: str
    of: Quantity
    below: bool
    bound: float

    def check(self, result: BenchResult) -> Checked:
        side = result.sides[0]
        values = [self.of.of(turn.records) for turn in result.turns if turn.side == side]
        found = mean_interval([value for value in values if value is not None])
        if found is None or None in values:
            needed = f"an interval needs {rounds_needed()} rounds, {len(values)} were run"
            return Checked(self.text, "not shown", needed)
        return Checked(
            self.text,
            _outcome(found.low, found.high, self.bound, self.below),
            f"{found} over {found.count} rounds",
        )


@dataclass(frozen=True)
class Relative:
    """A bound on the ratio to another side."""

    text: str
    of: Quantity
    below: bool
    factor: float
    side: str

    def check(self, result: BenchResult) -> Checked:
        other = other_side(self.side, result.sides, self.text)
        failed = sum(not r.ok for r in result.records(result.sides[0]))
        if failed:
            return Checked(self.text, "not shown", f"{failed} requests of {result.sides[0]} failed")
        found = ratio(result, other, self.of)
        if found.interval is None:
            return Checked(self.text, "not shown", found.reason)
        low, high = found.interval.low, found.interval.high
        detail = f"{found.interval.estimate:.3g}x [{low:.3g}, {high:.3g}] over {found.interval.count} rounds"
        return Checked(self.text, _outcome(low, high, self.factor, self.below), detail)


Claim = Percentile | Joint | Mean | Relative


def parse(text: str) -> Claim:
    """Parse a claim.

    Raises:
        UserError: the text is no claim, or names an unknown quantity.
    """
    where = f'--assert "{text}"'
    if found := JOINT.fullmatch(text.strip()):
        return Joint(text, _share(found["share"], where), _bounds(found["bounds"], where))
    relative, absolute = RELATIVE.fullmatch(text.strip()), ABSOLUTE.fullmatch(text.strip())
    found = relative or absolute
    if found is None:
        raise UserError("this is no assertion", where=where, fix=f"write {EXAMPLES}")
    of, below, number = (
        quantity(found["name"], where),
        found["operator"] in ("<", "<="),
        float(found["number"]),
    )
    if relative:
        return Relative(text, of, below, number, relative["side"])
    unit = found["unit"]
    if (unit in ("ms", "s")) == of.is_rate and unit:
        raise UserError(f"{of.name} is not measured in {unit}", where=where, fix=f"write {EXAMPLES}")
    bound = number * 1e3 if unit == "s" else number
    return Mean(text, of, below, bound) if of.q is None else Percentile(text, of, below, bound)


def parse_all(texts: Sequence[str], sides: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of a run, checked against the names of the sides before anything is measured."""
    claims = tuple(parse(text) for text in texts)
    for claim in claims:
        if isinstance(claim, Relative):
            other_side(claim.side, sides, claim.text)
    return claims


def other_side(name: str, sides: Sequence[str], text: str) -> str:
    """The side meant by ``name``; no name, or ``baseline``, is the second of two sides.

    Raises:
        UserError: no such side.
    """
    others = list(sides[1:])
    if name in others:
        return name
    if name in ("", "baseline") and len(others) == 1:
        return others[0]
    fix = nearest(name, others) if others else "add --baseline MODEL or --against SIDE"
    raise UserError(f"no side {name!r} to compare with", where=f'--assert "{text}"', fix=fix)


def _share(text: str, where: str) -> float:
    share = float(text)
    if not 0 < share < 100:
        raise UserError("a share lies between 0 % and 100 %", where=where, fix="write 95%:ttft<700ms")
    return share


def _bounds(text: str, where: str) -> LatencyBounds:
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = BOUND.fullmatch(part)
        metric = ALIASES.get(found["metric"], found["metric"]) if found else ""
        if found is None or metric not in LatencyBounds.__dataclass_fields__:
            known = ", ".join(LatencyBounds.__dataclass_fields__)
            raise UserError(
                f"no bound: {part.strip()!r}", where=where, fix=f"a bound is ttft<700ms, on {known}"
            )
        bounds[metric] = float(found["number"]) * (1e3 if found["unit"] == "s" else 1)
    return LatencyBounds(**bounds)


def _beyond(value: float, bound: float, below: bool) -> bool:
    return value <= bound if below else value >= bound


def _outcome(low: float, high: float, bound: float, below: bool) -> Outcome:
    near, far = (high, low) if below else (low, high)
    if _beyond(near, bound, below):
        return "held"
    return "not shown" if _beyond(far, bound, below) else "failed"

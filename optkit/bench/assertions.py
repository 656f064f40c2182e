"""Claims about a run, checked at 95 % confidence: ``--assert``.

======================================  =======================================================================
claim                                   held where
======================================  =======================================================================
``ttft_p95<700ms``                      the percentile is below the bound, by order statistics
``95%:ttft<700ms,tpot<50ms``            enough requests meet all bounds at once; a failed request meets none
``output_throughput>=30``               the mean over rounds is above, with the whole interval over rounds
``ttft_p50 <= 0.5x baseline``           the whole interval of the ratio is below; rounds are resampled
======================================  =======================================================================

The text is that of an objective (``optkit.bench.slo``); several bounds in a text are several claims. A claim is *held*,
*failed* (the opposite is shown) or *not shown*: the requests or rounds are too few, or the interval contains the bound.
Only a held claim passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optkit.bench.comparison import Quantity, ratio
from optkit.bench.metrics import OPTKIT, LatencyBounds
from optkit.bench.slo import Slo, Term, parse_slo
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

SAMPLED = {"itl": "itl_mean"}  # one sample a request: gaps of an answer are not independent


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
        q = self._q
        found = percentile_bounds(samples, q, failed)
        near, far = (found.high, found.low) if self.below else (found.low, found.high)
        counts = f"{found.count} requests" + (f", {failed} failed" if failed else "")
        if near is None:
            return Checked(self.text, "not shown", f"{self._needed} requests needed, {found.count} measured")
        sure = f"with 95 % confidence ({counts})"
        here, there = ("below", "above") if self.below else ("above", "below")
        if _beyond(near, self.bound, self.below):
            return Checked(self.text, "held", f"{here} {near:.4g} ms {sure}")
        if far is not None and not _beyond(far, self.bound, self.below):
            return Checked(self.text, "failed", f"{there} {far:.4g} ms {sure}")
        return Checked(self.text, "not shown", f"{here} {near:.4g} ms {sure}")

    @property
    def _q(self) -> float:
        return self.of.q or 50.0

    @property
    def _needed(self) -> int:
        """The fewest requests that bound the percentile on the side of the claim."""
        return samples_needed(self._q if self.below else 100 - self._q)

    def too_few(self, requests: int, _rounds: int) -> str | None:
        """The reason why so many requests in so many rounds can't show the claim, or None."""
        return too_few_requests(requests, self._needed)


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
        needed = samples_needed(self.share)
        if allowed is None:
            return Checked(self.text, "not shown", f"{needed} requests needed, {len(records)} measured")
        for name in self.bounds.bounds():
            sampled = sum(not r.ok or bool(OPTKIT[name].samples(r)) for r in records)
            if sampled < needed:  # answers of one token have no TPOT
                return Checked(
                    self.text,
                    "not shown",
                    f"{needed} requests with {name.upper()} needed, {sampled} measured",
                )
        if misses <= allowed:
            return Checked(self.text, "held", f"{counts}, {allowed} may")
        met = misses_allowed(len(records), 100 - self.share)
        if met is not None and len(records) - misses <= met:
            return Checked(self.text, "failed", f"{counts}, {allowed} may")
        return Checked(self.text, "not shown", f"{counts}, {allowed} may")

    def too_few(self, requests: int, _rounds: int) -> str | None:
        """The reason why so many requests in so many rounds can't show the claim, or None."""
        return too_few_requests(requests, samples_needed(self.share))


@dataclass(frozen=True)
class Mean:
    """A bound on a rate, or on a mean latency, over rounds."""

    text: str
    of: Quantity
    below: bool
    bound: float

    def check(self, result: BenchResult) -> Checked:
        side = result.sides[0]
        failed = 0 if self.of.is_rate else sum(not r.ok for r in result.records(side))
        if failed:
            return Checked(self.text, "not shown", f"{failed} requests of {side} failed")
        values = [self.of.of(turn.records) for turn in result.turns if turn.side == side]
        found = mean_interval([value for value in values if value is not None])
        if len(values) < rounds_needed():
            needed = f"an interval needs {rounds_needed()} rounds, {len(values)} were run"
            return Checked(self.text, "not shown", needed)
        if found is None or None in values:
            number = next(i for i, value in enumerate(values, 1) if value is None or not math.isfinite(value))
            return Checked(self.text, "not shown", f"round {number} has no value of {self.of.name}")
        return Checked(
            self.text,
            _outcome(found.low, found.high, self.bound, self.below),
            f"{found} over {found.count} rounds",
        )

    def too_few(self, _requests: int, rounds: int) -> str | None:
        """The reason why so many requests in so many rounds can't show the claim, or None."""
        return too_few_rounds(rounds)


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
        for side in (result.sides[0], other):
            if failed := sum(not r.ok for r in result.records(side)):
                return Checked(self.text, "not shown", f"{failed} requests of {side} failed")
        found = ratio(result, other, self.of)
        if found.interval is None:
            return Checked(self.text, "not shown", found.reason)
        low, high = found.interval.low, found.interval.high
        detail = f"{found.interval.estimate:.3g}x [{low:.3g}, {high:.3g}] over {found.interval.count} rounds"
        return Checked(self.text, _outcome(low, high, self.factor, self.below), detail)

    def too_few(self, _requests: int, rounds: int) -> str | None:
        """The reason why so many requests in so many rounds can't show the claim, or None."""
        return too_few_rounds(rounds)


def too_few_requests(requests: int, needed: int) -> str | None:
    """The reason why ``requests`` show nothing where ``needed`` do, or None."""
    return None if requests >= needed else f"{needed} requests are needed, not {requests}"


def too_few_rounds(rounds: int) -> str | None:
    """The reason why ``rounds`` have no interval, or None."""
    needed = rounds_needed()
    return None if rounds >= needed else f"an interval needs {needed} rounds, not {rounds}"


Claim = Percentile | Joint | Mean | Relative


def parse(text: str) -> tuple[Claim, ...]:
    """Parse the claims of a text, one for each bound; a share of requests has all its bounds in one claim.

    Raises:
        UserError: the text is no objective, or has a load.
    """
    slo = parse_slo(text, "--assert")
    where = f"--assert {text}"
    if slo.load is not None:
        fix = "leave out the part from @ on, and give --request-rate or --max-concurrency"
        raise UserError("a claim is about the measured load", where=where, fix=fix)
    if slo.share is not None:
        return (joint(text, slo, where),)
    single = len(slo.terms) == 1
    return tuple(of_term(text if single else str(term), term) for term in slo.terms)


def joint(text: str, slo: Slo, where: str) -> Joint:
    """The claim on a share of requests."""
    assert slo.share is not None
    known = tuple(LatencyBounds.__dataclass_fields__)
    if other := next((term.metric for term in slo.terms if term.metric not in known), None):
        fix = f"a share of requests has bounds on {', '.join(known)}"
        raise UserError(f"no bound of a request: {other}", where=where, fix=fix)
    if slo.share == 1:
        raise UserError("no number of requests shows 100 %", where=where, fix="write 99%:ttft<700ms")
    return Joint(text, 100 * slo.share, LatencyBounds(**{term.metric: term.value for term in slo.terms}))


def of_term(text: str, term: Term) -> Claim:
    """The claim on a bound."""
    of = Quantity(SAMPLED.get(term.metric, term.metric), term.percentile)
    if term.side is not None:
        return Relative(text, of, term.is_upper, term.value, term.side)
    if of.q is None:
        return Mean(text, of, term.is_upper, term.value)
    return Percentile(text, of, term.is_upper, term.value)


def parse_all(texts: Sequence[str], sides: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of a run, checked against the names of the sides before anything is measured."""
    claims = tuple(claim for text in texts for claim in parse(text))
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


def _beyond(value: float, bound: float, below: bool) -> bool:
    return value <= bound if below else value >= bound


def _outcome(low: float, high: float, bound: float, below: bool) -> Outcome:
    near, far = (high, low) if below else (low, high)
    if _beyond(near, bound, below):
        return "held"
    return "not shown" if _beyond(far, bound, below) else "failed"

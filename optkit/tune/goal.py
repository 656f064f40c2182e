"""The cost of a run under an objective: a number, at most 1 where the objective holds.

For an upper bound the cost is the value over the bound, for a lower bound the bound over the value; the largest of all
terms counts. With a share of requests (``95%:``) each request has a cost, and the cost of the run is the quantile at
the share. A failed request is infinitely late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optkit.bench.metrics import OPTKIT, chunk_gaps
from optkit.bench.records import RequestRecord, span
from optkit.bench.slo import RATES, Slo, Term
from optkit.bench.statistics import is_shown
from optkit.errors import UserError
from optkit.tune.intervals import upper_mean


def check_goal(slo: Slo) -> None:
    """Refuse objectives beyond a single server.

    Raises:
        UserError: a bound relative to another side.
    """
    for term in slo.terms:
        if term.side is not None:
            fix = "write a bound of its own, such as ttft_p95<700ms@4rps"
            raise UserError(f"{term} compares two sides", where=f"--slo {slo}", fix=fix)


def samples(term: Term, record: RequestRecord) -> list[float]:
    """The samples of a latency of a request, in milliseconds; infinite for a failed request."""
    if not record.ok:
        return [math.inf]
    found = chunk_gaps(record) if term.metric == "itl" else OPTKIT[term.metric].samples(record)
    return [1e3 * seconds for seconds in found]


def value(term: Term, records: Sequence[RequestRecord]) -> float:
    """The value bounded by ``term``: milliseconds, or a number per second. NaN without samples."""
    if term.metric in RATES:
        return _rate(term, records)
    found = [sample for record in records for sample in samples(term, record)]
    if not found:
        return math.nan
    percentile = term.percentile
    if percentile is None:
        return float(np.mean(found))
    return _quantile(found, percentile / 100)


def _rate(term: Term, records: Sequence[RequestRecord]) -> float:
    seconds, done = span(records), [record for record in records if record.ok]
    if not seconds:
        return 0.0
    return (sum(r.tokens for r in done) if term.metric == "output_throughput" else len(done)) / seconds


def _quantile(values: Sequence[float], share: float) -> float:
    """numpy's default quantile; infinite as soon as an infinite value takes part."""
    ordered = np.sort(np.asarray(values))
    if math.isinf(ordered[math.ceil(share * (len(ordered) - 1))]):
        return math.inf
    return float(np.quantile(ordered, share))


def excess(term: Term, found: float) -> float:
    """``found`` as a multiple of the bound, the inverse for a lower bound; infinite for NaN."""
    if math.isnan(found):
        return math.inf
    if term.is_upper:
        return found / term.value
    return term.value / found if found > 0 else math.inf


def cost(slo: Slo, records: Sequence[RequestRecord]) -> float:
    """The cost of a run; at most 1 where the objective holds."""
    if not records or any(not measured(term, records) for term in slo.terms):
        return math.inf
    if slo.share is not None:
        return _quantile([request_cost(slo, record) for record in records], slo.share)
    return max(excess(term, value(term, records)) for term in slo.terms)


def request_cost(slo: Slo, record: RequestRecord) -> float:
    """The largest multiple of a bound over the terms of a request."""
    terms = [term for term in slo.terms if term.metric not in RATES]
    found = [excess(term, sample) for term in terms for sample in samples(term, record)]
    return max(found, default=0.0 if record.ok else math.inf)


def is_within(term: Term, record: RequestRecord) -> bool:
    """True if each sample of ``record`` is within the bound of ``term``."""
    return record.ok and all(term.met(sample) for sample in samples(term, record))


def measured(term: Term, records: Sequence[RequestRecord]) -> int:
    """The requests with a sample of ``term``; all of them for a rate. An answer of one token has no TPOT."""
    if term.metric in RATES:
        return len(records)
    return sum(bool(samples(term, record)) for record in records)


def is_held(slo: Slo, records: Sequence[RequestRecord]) -> list[str]:
    """A line for each part of the objective not shown by ``records`` at 95 % confidence; empty where all are shown.

    A percentile and a share need enough requests within the bound (``optkit.bench.statistics.is_shown``), a mean has
    Student's interval, a rate counts as measured. Requests without a sample show nothing.
    """
    if slo.share is not None:
        misses = sum(not all(is_within(term, record) for term in slo.terms) for record in records)
        fewest = min(measured(term, records) for term in slo.terms)
        return [] if is_shown(fewest, misses, 100 * slo.share) else [_not_shown(str(slo), misses, fewest)]
    lines = []
    for term in slo.terms:
        percentile = term.percentile
        if percentile is not None and term.is_upper:
            misses = sum(not is_within(term, record) for record in records)
            count = measured(term, records)
            if not is_shown(count, misses, percentile):
                lines.append(_not_shown(str(term), misses, count))
        elif not term.met(_worst(term, records)):
            lines.append(f"{term}: {_worst(term, records):.4g}")
    return lines


def _worst(term: Term, records: Sequence[RequestRecord]) -> float:
    """The value of a mean with its upper bound; other values as they are."""
    if term.statistic == "mean" and term.is_upper:
        return upper_mean([sample for record in records for sample in samples(term, record)])
    return value(term, records)


def _not_shown(what: str, misses: int, requests: int) -> str:
    return (
        f"{what}: {misses} of {requests} requests miss it" if requests else f"{what}: no request has a sample"
    )


def needed_share(slo: Slo) -> float:
    """The largest share of requests in the objective: 0.95 for a p95, a mean and a rate."""
    shares = [term.percentile / 100 for term in slo.terms if term.percentile is not None]
    return slo.share if slo.share is not None else max(shares, default=0.95)


def describe(slo: Slo, records: Sequence[RequestRecord]) -> str:
    """The values of a run, as in ``ttft_p95 512 ms``."""
    parts = []
    for term in slo.terms:
        name = term.name if slo.share is None else f"{term.metric}_p{100 * slo.share:g}"
        shown = term if slo.share is None else Term(term.metric, f"p{100 * slo.share:g}", "<", term.value)
        unit = "/s" if term.metric in RATES else " ms"
        parts.append(f"{name} {value(shown, records):.4g}{unit}")
    return ", ".join(parts)

"""Metric formulas, printed beside their names, because benchmark tools use the same name for different metrics.

Notation for a request: ``send``; ``first``, the first chunk with text; ``done``, the end of the stream; ``n`` output
tokens. Percentiles interpolate linearly between order statistics (numpy's default, Hyndman-Fan type 7). Failed
requests are left out of latency percentiles, counted in ``failed``, and are misses in goodput and SLOs.

``DEFINITIONS`` holds the formulas of further tools for the same metrics, as read in code or documentation in 2026.
Computing them on optkit's records compares only the definitions: the client of each tool adds a different overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from optkit.bench.records import RequestRecord, span

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Metric:
    """A latency: the formula in words, and the samples (seconds) of one finished request."""

    formula: str
    samples: Callable[[RequestRecord], list[float]]


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, interpolated linearly; None without values."""
    return float(np.percentile(values, q)) if len(values) else None


# -- per request ------------------------------------------------------------------------------------


def ttft(r: RequestRecord) -> list[float]:
    """Time to first token; empty without a token."""
    return [] if r.first_token is None else [r.first_token - r.send]


def e2e(r: RequestRecord) -> list[float]:
    """Time from sending to the end of the stream."""
    return [] if r.done is None else [r.done - r.send]


def tpot(r: RequestRecord) -> list[float]:
    """Time per output token after the first; empty for a single output token."""
    if r.tokens < 2 or r.done is None or r.first_token is None:
        return []
    return [(r.done - r.first_token) / (r.tokens - 1)]


def chunk_gaps(r: RequestRecord) -> list[float]:
    return [b.time - a.time for a, b in pairwise(c for c in r.chunks if not c.empty)]


def mean_gap(r: RequestRecord) -> list[float]:
    """(last - first) / (tokens after the first chunk)."""
    texts = [c for c in r.chunks if not c.empty]
    later = r.tokens - texts[0].tokens if texts else 0
    return [(texts[-1].time - texts[0].time) / later] if later > 0 and len(texts) > 1 else []


def _any_chunk_ttft(r: RequestRecord) -> list[float]:
    return [] if r.first_chunk is None else [r.first_chunk - r.send]


def _vllm_tpot(r: RequestRecord) -> list[float]:
    if r.tokens < 2 or r.first_chunk is None:
        return []
    return [(r.chunks[-1].time - r.first_chunk) / (r.tokens - 1)]


def _all_gaps(r: RequestRecord) -> list[float]:
    return [b.time - a.time for a, b in pairwise(r.chunks)]


def _guidellm_tpot(r: RequestRecord) -> list[float]:
    return [(r.last_token - r.send) / r.tokens] if r.last_token is not None and r.tokens else []


def _guidellm_itl(r: RequestRecord) -> list[float]:
    if r.tokens < 2 or r.last_token is None or r.first_token is None:
        return []
    return [(r.last_token - r.first_token) / (r.tokens - 1)]


def _llmperf_itl(r: RequestRecord) -> list[float]:
    return [e / r.tokens for e in e2e(r)] if r.tokens else []


OPTKIT = {
    "ttft": Metric("first - send", ttft),
    "tpot": Metric("(done - first) / (n - 1)", tpot),
    "itl_chunks": Metric("gaps between chunks with text, pooled over requests", chunk_gaps),
    "itl_mean": Metric("(last - first) / (n - tokens of first chunk), one per request", mean_gap),
    "e2e": Metric("done - send", e2e),
}
DEFINITIONS: dict[str, dict[str, Metric]] = {
    "optkit": OPTKIT,
    "vllm": {
        "ttft": Metric("first chunk of any kind - send", _any_chunk_ttft),
        "tpot": Metric("(last chunk - first chunk) / (n - 1)", _vllm_tpot),
        "itl": Metric("gaps between chunks of any kind, pooled", _all_gaps),
        "e2e": Metric("last chunk - send", lambda r: [r.chunks[-1].time - r.send] if r.chunks else []),
    },
    "aiperf": {
        "ttft": Metric("first - send", ttft),
        "itl": Metric("(last - first) / (n - tokens of first chunk), one per request", mean_gap),
        "icl": Metric("gaps between chunks with text, pooled", chunk_gaps),
        "e2e": Metric("last - send", lambda r: [] if r.last_token is None else [r.last_token - r.send]),
    },
    "guidellm": {
        "ttft": Metric("first - send", ttft),
        "tpot": Metric("(last - send) / n: includes TTFT", _guidellm_tpot),
        "itl": Metric("(last - first) / (n - 1), one per request", _guidellm_itl),
        "e2e": Metric("done - send", e2e),
    },
    "llmperf": {
        "ttft": Metric("first - send", ttft),
        "itl": Metric("(done - send) / n: includes TTFT", _llmperf_itl),
        "e2e": Metric("done - send", e2e),
    },
}


# -- over a run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatencyBounds:
    """Upper bounds in milliseconds. ``None`` is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def bounds(self) -> dict[str, float]:
        pairs = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: bound for name, bound in pairs.items() if bound is not None}

    def met(self, r: RequestRecord) -> bool:
        """Return True if the request finished within every bound.

        A metric without a sample counts as within the bound.
        """
        kept = all(1e3 * s <= bound for name, bound in self.bounds().items() for s in OPTKIT[name].samples(r))
        return r.ok and kept


def latency(records: Iterable[RequestRecord], definitions: str = "optkit") -> dict[str, dict[str, Any]]:
    """{metric: {mean, p50, p95, p99 in ms, samples, formula}} over the finished requests."""
    finished = [r for r in records if r.ok]
    table = {}
    for name, metric in DEFINITIONS[definitions].items():
        samples = [1e3 * s for r in finished for s in metric.samples(r)]
        row: dict[str, Any] = {"mean": float(np.mean(samples)) if samples else None}
        row |= {f"p{q}": percentile(samples, q) for q in PERCENTILES}
        table[name] = row | {"samples": len(samples), "formula": metric.formula}
    return table


def summarize(
    records: Sequence[RequestRecord], slo: LatencyBounds | None = None, definitions: str = "optkit"
) -> dict[str, Any]:
    """The summary of a run: counts, latencies in ms, throughput, and goodput if there is an SLO.

    ``duration_s`` runs from the first send to the last event. ``output_throughput`` is output tokens of finished
    requests / duration, ``request_throughput`` finished requests / duration, ``goodput`` requests within the SLO /
    duration, ``slo_attainment`` the share of *all* requests within the SLO.
    """
    finished = [r for r in records if r.ok]
    seconds = span(records)
    rate = (lambda count: count / seconds) if seconds else (lambda count: 0.0)
    summary: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(finished),
        "duration_s": seconds,
        "output_tokens": sum(r.tokens for r in finished),
        "cached_tokens": sum(r.cached_tokens for r in finished),
        "output_throughput": rate(sum(r.tokens for r in finished)),
        "request_throughput": rate(len(finished)),
        "latency_ms": latency(records, definitions),
    }
    if slo and slo.bounds():
        good = sum(slo.met(r) for r in records)
        summary |= {"goodput": rate(good), "slo_attainment": good / len(records) if records else 0.0}
    return summary


def slo_misses(records: Sequence[RequestRecord], slo: LatencyBounds, q: float = 95) -> list[str]:
    """A line for each bound with a missed q-th percentile, or without a sample to compare.

    Failed requests count as infinitely late.
    """
    lines = []
    failed = sum(not r.ok for r in records)
    for name, bound in slo.bounds().items():
        samples = [1e3 * s for r in records if r.ok for s in OPTKIT[name].samples(r)]
        value = _percentile_with_failures(samples, failed, q)
        if value is None:
            lines.append(f"p{q:g} {name} is not measured: no answer has a sample of {OPTKIT[name].formula}")
        elif value > bound:
            lines.append(f"p{q:g} {name} {value:.1f} ms > {bound:g} ms")
    return lines


def _percentile_with_failures(samples: list[float], failed: int, q: float) -> float | None:
    """Percentile with an infinite sample for each failure; None without any."""
    if not failed:
        return percentile(samples, q)
    ordered = np.sort(np.array([*samples, *[np.inf] * failed]))
    return float(ordered[int(np.ceil(q / 100 * (len(ordered) - 1)))])  # interpolating towards inf is inf

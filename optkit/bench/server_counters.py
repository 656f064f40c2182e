"""Counters of a measured server from ``/metrics``: prompt tokens looked up in its prefix cache, and found there.

vLLM's names, which optkit has as well. A server without ``/metrics``, or without the counters, is no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SAMPLE = re.compile(
    r"^vllm:prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)


@dataclass(frozen=True)
class CacheCounters:
    """Prompt tokens that a prefix cache was asked for and had, summed over engines."""

    queries: float
    hits: float

    def since(self, before: CacheCounters) -> CacheCounters:
        """The difference to an earlier state."""
        return CacheCounters(self.queries - before.queries, self.hits - before.hits)


def cache_counters(text: str | None) -> CacheCounters | None:
    """The counters in Prometheus text; None without text, or without both counters."""
    sums: dict[str, float] = {}
    for name, value in SAMPLE.findall(text or ""):
        sums[name] = sums.get(name, 0.0) + float(value)
    return CacheCounters(sums["queries"], sums["hits"]) if {"queries", "hits"} <= sums.keys() else None

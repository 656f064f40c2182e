"""Counters of the response cache."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from optkit.serve.cache.store import ResponseStore
from optkit.serve.engine_metrics import LABELS

RESULTS = ("hit", "shared", "miss", "bypass")


class CacheMetrics:
    """Requests by result, and the memory of ``store``; ``labels`` are the values of ``LABELS``."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str], store: ResponseStore) -> None:
        requests = Counter(
            "optkit:response_cache_requests",
            "Requests: answered from the cache, with another's answer, computed, or not for the cache.",
            (*LABELS, "result"),
            registry=registry,
        )
        self.requests = {result: requests.labels(*labels, result) for result in RESULTS}
        for name, text, value in (
            ("optkit:response_cache_bytes", "Memory of the kept answers.", lambda: store.num_bytes),
            ("optkit:response_cache_entries", "Kept answers.", lambda: len(store)),
            ("optkit:response_cache_evictions", "Answers dropped for room.", lambda: store.num_evictions),
        ):
            gauge = Gauge(name, text, LABELS, registry=registry)
            gauge.labels(*labels).set_function(value)

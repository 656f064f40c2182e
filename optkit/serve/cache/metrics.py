"""Metrics of the response cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optkit.serve.cache.store import ResponseStore
from optkit.serve.engine_metrics import LABELS
from optkit.serve.metrics import Metrics

RESULTS = ("hit", "shared", "miss", "bypass")


def cache_metrics(metrics: Metrics, store: ResponseStore) -> CacheMetrics:
    """The metrics of ``store``, registered once; a later store takes the place of the one before."""
    if metrics.response_cache is None:
        metrics.response_cache = CacheMetrics(metrics.registry, metrics.labels, store)
    metrics.response_cache.store = store
    return metrics.response_cache


class CacheMetrics(Collector):
    """Counts requests, and collects the numbers of ``store`` at scrape time.

    Args:
        labels: the values of ``LABELS``.

    Attributes:
        requests: the counter of each of ``RESULTS``.
    """

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str], store: ResponseStore) -> None:
        self._labels, self.store = labels, store
        requests = Counter(
            "optkit:response_cache_requests",
            "Requests: answered from the cache, with another's answer, computed, or not for the cache.",
            (*LABELS, "result"),
            registry=registry,
        )
        self.requests = {result: requests.labels(*labels, result) for result in RESULTS}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("bytes", "Memory of the kept answers and of those in progress.", self.store.num_bytes),
            ("entries", "Kept answers.", len(self.store)),
        ):
            gauge = GaugeMetricFamily(f"optkit:response_cache_{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        text = "Kept answers dropped for others."
        evictions = CounterMetricFamily("optkit:response_cache_evictions", text, labels=LABELS)
        evictions.add_metric(self._labels, self.store.num_evictions)
        yield evictions

"""Metrics of the response cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optkit.serve.cache.store import ResponseStore
from optkit.serve.engine_metrics import LABELS

RESULTS = ("hit", "shared", "miss", "bypass")


def add_metrics(
    registry: CollectorRegistry, labels: Sequence[str], store: ResponseStore
) -> dict[str, Counter]:
    """Register the metrics of ``store``; gives the counter of requests by each of ``RESULTS``.

    Args:
        labels: the values of ``LABELS``.
    """
    requests = Counter(
        "optkit:response_cache_requests",
        "Requests: answered from the cache, with another's answer, computed, or not for the cache.",
        (*LABELS, "result"),
        registry=registry,
    )
    registry.register(StoreMetrics(labels, store))
    return {result: requests.labels(*labels, result) for result in RESULTS}


class StoreMetrics(Collector):
    """Collects the numbers of ``store`` at scrape time."""

    def __init__(self, labels: Sequence[str], store: ResponseStore) -> None:
        self._labels, self._store = labels, store

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("bytes", "Memory of the kept answers and of those in progress.", self._store.num_bytes),
            ("entries", "Kept answers.", len(self._store)),
        ):
            gauge = GaugeMetricFamily(f"optkit:response_cache_{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        text = "Kept answers dropped for others."
        evictions = CounterMetricFamily("optkit:response_cache_evictions", text, labels=LABELS)
        evictions.add_metric(self._labels, self._store.num_evictions)
        yield evictions

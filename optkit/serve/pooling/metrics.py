"""Metrics of the endpoints with vectors, apart from the metrics of generation, whose times stay undistorted."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from optkit.serve.engine_metrics import LABELS

EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0)


class PoolingMetrics:
    """Counters of texts and tokens, and the time of requests.

    Args:
        labels: the values of ``LABELS``.
    """

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        texts = Counter("optkit:embedded_texts", "Texts turned into vectors.", LABELS, registry=registry)
        tokens = Counter("optkit:embedded_tokens", "Tokens of these texts.", LABELS, registry=registry)
        seconds = Histogram(
            "optkit:embedding_request_seconds",
            "Arrival to answer of embeddings, reranking and scores.",
            LABELS,
            buckets=EDGES,
            registry=registry,
        )
        self._texts, self._tokens = texts.labels(*labels), tokens.labels(*labels)
        self._seconds = seconds.labels(*labels)

    def observe(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """Count an answered request."""
        self._texts.inc(num_texts)
        self._tokens.inc(num_tokens)
        self._seconds.observe(seconds)

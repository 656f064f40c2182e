"""Metrics of the response cache, with those of the server."""

from __future__ import annotations

from optkit.runtime.types import EngineStats
from optkit.serve.cache.metrics import cache_metrics
from optkit.serve.cache.store import ResponseStore
from optkit.serve.metrics import Metrics


def test_store_of_a_model_loaded_again_takes_the_place_of_the_store_before() -> None:
    metrics = Metrics("tiny", EngineStats)
    first, second = ResponseStore(1 << 20), ResponseStore(1 << 20)
    first.put(b"a", (), b"one", None)
    cache_metrics(metrics, first).requests["hit"].inc()
    cache_metrics(metrics, second).requests["hit"].inc()
    second.put(b"a", (), b"one", None)
    second.put(b"b", (), b"two", None)
    text = metrics.render().decode()
    assert 'optkit:response_cache_entries{engine="0",model_name="tiny"} 2.0' in text
    assert 'optkit:response_cache_requests_total{engine="0",model_name="tiny",result="hit"} 2.0' in text

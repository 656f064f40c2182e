"""Metrics of the response cache, with those of the server."""

from __future__ import annotations

import asyncio

from optkit.runtime.types import EngineStats
from optkit.serve.cache.metrics import cache_metrics
from optkit.serve.cache.store import ResponseStore
from optkit.serve.metrics import Metrics
from tests.serve.cache.calls import GREEDY, cached_app
from tests.support.http_calls import CHAT
from tests.support.serve_fakes import client


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


def test_answers_of_an_application_that_ended_are_freed() -> None:
    """Its metrics live on, with several models."""
    app = cached_app()

    async def live() -> None:
        async with app.router.lifespan_context(app), client(app) as http:
            assert (await http.post(CHAT, json=GREEDY)).status_code == 200
            assert "optkit:response_cache_entries{" in metrics.render().decode()
            assert metrics.response_cache and len(metrics.response_cache.store) == 1

    metrics = app.state.parts.metrics
    asyncio.run(live())
    text = metrics.render().decode()
    assert 'optkit:response_cache_bytes{engine="0",model_name="tiny"} 0.0' in text
    assert 'optkit:response_cache_requests_total{engine="0",model_name="tiny",result="miss"} 1.0' in text

"""Prometheus text of prefix caches."""

from __future__ import annotations

from optkit.bench.server_counters import CacheCounters, cache_counters
from optkit.bench.servers import metrics_text
from tests.support.fake_server import FakeServer, normal

TEXT = """\
# HELP vllm:prefix_cache_queries_total Prompt tokens looked up.
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+03
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 128.0
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
"""


def test_counters_are_summed_over_engines() -> None:
    found = cache_counters(TEXT)
    assert found == CacheCounters(2000.0, 128.0)
    assert found is not None and found.since(CacheCounters(1000.0, 100.0)) == CacheCounters(1000.0, 28.0)
    assert cache_counters("vllm:prefix_cache_hits 3\nvllm:prefix_cache_queries 9\n") == CacheCounters(
        9.0, 3.0
    )


def test_a_server_without_counters_is_no_error() -> None:
    assert cache_counters("vllm:prefix_cache_hits_total 3\n") is None
    with FakeServer(normal).run() as url:
        assert metrics_text(url) is None
    assert cache_counters(metrics_text("http://127.0.0.1:9")) is None

"""Several registries on one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from optkit.serve.models.metrics import MergedRegistries


def registry(name: str, count: int) -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("requests", "Requests.", ("model_name",), registry=found).labels(name).inc(count)
    Gauge("build_info", "The version.", registry=found).set(1)
    return found


def test_each_family_and_each_series_comes_once() -> None:
    text = MergedRegistries([registry("a", 2), registry("b", 3)]).render().decode()
    assert text.count("# TYPE requests_total counter") == 1
    assert text.count("# TYPE build_info gauge") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        s.labels["model_name"]: s.value for s in families["requests"].samples if s.name == "requests_total"
    }
    assert values == {"a": 2, "b": 3}
    assert [sample.value for sample in families["build_info"].samples] == [1]

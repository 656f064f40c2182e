"""Metrics of several models: loads, unloads and waits of each, and the metrics of all on a page.

The ``engine`` label counts the models of the server from 0, so series without ``model_name`` stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from optkit.serve.engine_metrics import LABELS
from optkit.serve.models.pool import IDLE, LOST, MEMORY

EDGES = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REASONS = (IDLE, MEMORY, LOST)


class PoolMetrics:
    """The metrics of a pool (``optkit.serve.models.pool.Observer``).

    Args:
        names: of the models, in the order of their ``engine`` labels.
        budget_bytes: memory of all models together.
        reserved: returns the bytes in use.
        is_loaded: returns whether a model is loaded.
    """

    def __init__(
        self,
        names: Iterable[str],
        budget_bytes: int,
        reserved: Callable[[], int],
        is_loaded: Callable[[str], bool],
    ) -> None:
        self.registry = CollectorRegistry()
        labels = {name: (name, str(index)) for index, name in enumerate(names)}
        load = self._histogram("model_load_seconds", "Loading a model, until it takes requests.")
        wait = self._histogram("model_wait_seconds", "Waits of requests for their model: memory and load.")
        loaded = Gauge("optkit:model_loaded", "1 while the model is loaded.", LABELS, registry=self.registry)
        failed = self._counter("model_load_failures", "Loads that failed.")
        unloads = self._counter(
            "model_unloads", "Unloads by reason: idle, memory for another model, lost engine.", "reason"
        )
        for name, values in labels.items():
            loaded.labels(*values).set_function(lambda name=name: is_loaded(name))  # type: ignore[misc]
        self._loads = {name: load.labels(*values) for name, values in labels.items()}
        self._waits = {name: wait.labels(*values) for name, values in labels.items()}
        self._failures = {name: failed.labels(*values) for name, values in labels.items()}
        self._unloads = {
            (name, reason): unloads.labels(*values, reason)
            for name, values in labels.items()
            for reason in REASONS
        }
        budget = Gauge("optkit:memory_budget_bytes", "Memory for all models.", registry=self.registry)
        budget.set(budget_bytes)
        used = Gauge("optkit:memory_reserved_bytes", "Memory of the loaded models.", registry=self.registry)
        used.set_function(reserved)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"optkit:{name}", text, LABELS, buckets=EDGES, registry=self.registry)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"optkit:{name}", text, (*LABELS, *more), registry=self.registry)

    def loaded(self, name: str, seconds: float) -> None:
        self._loads[name].observe(seconds)

    def failed(self, name: str) -> None:
        self._failures[name].inc()

    def unloaded(self, name: str, reason: str) -> None:
        self._unloads[name, reason].inc()

    def waited(self, name: str, seconds: float) -> None:
        self._waits[name].observe(seconds)


class MergedRegistries:
    """The metrics of several registries, each family once, as the exposition format demands."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = list(registries)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        seen = set()
        for metric in (metric for registry in self._registries for metric in registry.collect()):
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
            )
            for sample in metric.samples:
                key = (sample.name, _frozen(sample.labels))
                if key not in seen:  # facts of the whole server are in each registry
                    seen.add(key)
                    family.samples.append(sample)
        yield from families.values()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self)  # type: ignore[arg-type]


def _frozen(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))

"""Metrics of a fleet beside an engine's metrics: replicas by state, load of each, and answers continued elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optkit.fleet.engine import FleetEngine
from optkit.fleet.replica import ReplicaReport

STATES = ("ready", "held", "draining", "restarting", "lost")


class FleetMetrics(Collector):
    """Collects from ``engine`` at scrape time. Labels are the ids of the present replicas."""

    def __init__(self, engine: FleetEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        reports = {report.replica_id: report for report in self._engine.reports}
        ready = self._engine.ready_ids
        states = Counter(state_of(report, name in ready) for name, report in reports.items())
        family = GaugeMetricFamily("optkit:fleet_replicas", "Replicas by state.", labels=["state"])
        for state in STATES:
            family.add_metric([state], states[state])
        yield family
        for metric, text, field in (
            ("optkit:fleet_running_requests", "Requests that a replica computes.", "num_running"),
            ("optkit:fleet_waiting_requests", "Requests that wait at a replica.", "num_waiting"),
            ("optkit:fleet_queue_seconds", "Predicted time to a request's first step.", "queue_seconds"),
        ):
            gauge = GaugeMetricFamily(metric, text, labels=["replica"])
            for name, report in reports.items():
                gauge.add_metric([name], getattr(report, field))
            yield gauge
        for metric, text, count in (
            (
                "optkit:fleet_migrations",
                "Answers continued by another replica.",
                self._engine.failover.num_migrations,
            ),
            ("optkit:fleet_moves", "Requests moved before they were begun.", self._engine.failover.num_moves),
        ):
            counter = CounterMetricFamily(metric, text)
            counter.add_metric([], count)
            yield counter

    def describe(self) -> Iterable[Metric]:
        return []


def state_of(report: ReplicaReport, is_ready: bool) -> str:
    """The state of a replica, out of ``STATES``."""
    if is_ready:
        return "ready"
    if report.is_draining:
        return "draining"
    if report.is_ready and report.is_held:
        return "held"
    return "restarting" if report.is_restarting else "lost"

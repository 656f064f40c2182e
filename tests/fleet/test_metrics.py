"""Replicas by state, and the load of each, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from optkit.fleet.metrics import FleetMetrics, state_of
from optkit.fleet.replica import ReplicaReport
from optkit.runtime.types import EngineStats
from tests.support.fleet import fleet, on_loop
from tests.support.serve_fakes import FakeEngine


@on_loop
async def test_a_scrape_has_states_and_load() -> None:
    busy, dead = FakeEngine(), FakeEngine()
    busy.stats, dead.is_healthy, dead.is_restarting = EngineStats(num_running=3), False, True
    async with fleet(busy, dead) as engine:
        registry = CollectorRegistry()
        registry.register(FleetMetrics(engine))
        value = registry.get_sample_value
        assert value("optkit:fleet_replicas", {"state": "ready"}) == 1
        assert value("optkit:fleet_replicas", {"state": "restarting"}) == 1
        assert value("optkit:fleet_running_requests", {"replica": "0"}) == 3
        assert value("optkit:fleet_migrations_total", {}) == 0


def test_states() -> None:
    def report(**facts: bool) -> ReplicaReport:
        return ReplicaReport(replica_id="a", version="", **facts)

    assert state_of(report(), True) == "ready"
    assert state_of(report(is_draining=True), False) == "draining"
    assert state_of(report(is_restarting=True), False) == "restarting"
    assert state_of(report(), False) == "lost"

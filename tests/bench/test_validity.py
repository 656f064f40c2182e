"""Doubts: each has a run that deserves it, and a clean run has none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from optkit.bench.client_load import ClientLoad
from optkit.bench.metrics import LatencyBounds
from optkit.bench.result import BenchResult
from optkit.bench.server_counters import CacheCounters
from optkit.bench.validity import TurnConditions, measuring_doubts
from tests.support.rounds import record, result_of

CALM = TurnConditions(0.4, ClientLoad(0.1, 0.5, 1.0), CacheCounters(1000.0, 0.0))


def run(conditions: TurnConditions = CALM, **config: object) -> BenchResult:
    """Four rounds of 20 steady requests."""
    made = result_of(4, 20, lambda side, r, i: 0.5 + 0.01 * (i * 7 % 5), sides=("a",))
    made.turns = [replace(turn, conditions=conditions) for turn in made.turns]
    made.config = replace(made.config, **config)  # type: ignore[arg-type]
    return made


def test_a_calm_run_is_trusted() -> None:
    found = run().validity()
    assert found.doubts == () and found.to_dict()["trusted"] is True
    side = found.record["sides"]["a"]
    assert side["requests"] == 80 and side["p95_shown"] and not side["p99_shown"]
    assert side["client_cpu_share"] == 0.1 and side["cache_hit_share"] == 0.0


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (replace(CALM, client=ClientLoad(0.95, 0.1, 0.1)), "the client used 95%"),
        (replace(CALM, client=ClientLoad(0.1, 60.0, 80.0)), "60.0 ms late"),
        (replace(CALM, cache=CacheCounters(1000.0, 64.0)), "256 prompt tokens"),
    ],
)
def test_clients_and_caches_raise_doubts(conditions: TurnConditions, message: str) -> None:
    (doubt,) = run(conditions).validity().doubts
    assert message in doubt and doubt.startswith("a: ")
    assert measuring_doubts(run(conditions)) == [doubt]


def test_cache_hits_are_expected_where_prompts_share_prefixes() -> None:
    hits = replace(CALM, cache=CacheCounters(1000.0, 500.0))
    found = run(hits, shared_prefix_len=8).validity()
    assert found.doubts == () and found.record["sides"]["a"]["cache_hit_share"] == 0.5


def test_drifting_latencies_raise_a_doubt() -> None:
    drifting = result_of(4, 20, lambda side, r, i: 0.5 + 0.005 * (20 * r + i), sides=("a",))
    (doubt,) = drifting.validity().doubts
    assert "not steady: ttft went from" in doubt
    slight = result_of(4, 20, lambda side, r, i: 0.5 + 0.0001 * (20 * r + i), sides=("a",))
    assert slight.validity().doubts == ()


def test_a_growing_queue_raises_a_doubt_in_an_open_loop() -> None:
    made = run(request_rate=0.1)
    made.turns[1].records[:] = [record(i, 1.0 + 25.0 * i, send=10.0 * i) for i in range(20)]
    assert any("the queue grew in round 2" in doubt for doubt in made.validity().doubts)
    assert not any("queue" in doubt for doubt in run(request_rate=0.1).validity().doubts)


def test_a_bound_needs_its_sample_size_and_a_machine_its_quiet() -> None:
    made = run()
    made.turns = made.turns[:2]
    made.slo, made.environment = LatencyBounds(ttft=700), {"load_average": 2.0, "cores": 2}
    busy, few = made.validity().doubts
    assert "busy" in busy and "59 needed" in few


def test_conditions_survive_json() -> None:
    made = run(request_rate=float("inf"))
    again = BenchResult.from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False)))
    assert again == made
    without = replace(CALM, cache=None)
    assert TurnConditions.from_dict(without.to_dict()) == without

"""Paired runs: the order of turns, and failures."""

import pytest

from optkit.bench import run as bench_run
from optkit.bench.metrics import LatencyBounds
from optkit.bench.run import Side, run_bench
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from tests.support.fake_server import FakeServer, normal

CONFIG = WorkloadConfig(num_prompts=2, input_len=6, output_len=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)
    monkeypatch.setattr("optkit.bench.environment.load_average", lambda: 0.0)
    monkeypatch.setattr("optkit.bench.environment.cpu_in_use", lambda: None)
    monkeypatch.setattr(bench_run, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(bench_run.workload, "text_ids", lambda tokenizer: list(range(500)))


def test_run_bench_alternates_sides_on_identical_requests():
    order, servers = [], {}
    for name in "ab":
        servers[name] = FakeServer(lambda body, name=name: order.append(name) or normal(body))
    with servers["a"].run() as a, servers["b"].run() as b:
        result = run_bench([Side("a", url=a + "/v1"), Side("b", url=b)], CONFIG, "", rounds=3, num_warmups=1)
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert servers["a"].bodies == servers["b"].bodies
    prompts = [tuple(body["prompt"]) for body in servers["a"].bodies]
    assert len(set(prompts)) == len(prompts) == 7
    assert [(t.side, t.round) for t in result.turns] == [
        *[("a", 0), ("b", 0)],
        *[("b", 1), ("a", 1)],  # no side is always the later one
        *[("a", 2), ("b", 2)],
    ]
    assert all(t.conditions and t.conditions.client.cpu_share >= 0 for t in result.turns)
    assert result.problems() == [] and all(t.load_average >= 0 for t in result.turns)
    assert {"cpu", "packages", "command", "cores"} <= set(result.environment)


def test_run_bench_reports_problems_when_requests_fail():
    with FakeServer(lambda body: ["{"]).run() as url:
        result = run_bench(
            [Side("a", url=url)], CONFIG, "", rounds=1, num_warmups=0, slo=LatencyBounds(ttft=1000)
        )
    assert len(result.problems()) == 2 and "a round 0: request 0 failed" in result.problems()[0]
    assert result.slo_misses() == ["p95 ttft inf ms > 1000 ms"]


def test_a_server_that_answers_no_warm_up_is_refused_before_the_rounds():
    server = FakeServer(lambda body: ["{"])
    with server.run() as url, pytest.raises(UserError, match="every warm-up request failed"):
        run_bench([Side("a", url=url)], CONFIG, "", rounds=50, num_warmups=2)
    assert len(server.bodies) == 2

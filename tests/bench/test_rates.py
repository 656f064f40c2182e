"""The search for a rate on known capacities and on a server with one; sweeps up to saturation."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench import run as bench_run
from optkit.bench.assertions import parse
from optkit.bench.metrics import LatencyBounds
from optkit.bench.rates import FoundRate, Probe, Promise, find_rate, search, sweep
from optkit.bench.rates_table import COLUMNS, cells, rate_table, sweep_table
from optkit.bench.run import Side, session
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from tests.support.fake_server import FakeServer, normal
from tests.support.rounds import broken, result_of

IDS = list(range(2000))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "SETTLE", 0.0)


@given(st.floats(0.05, 500), st.floats(0.1, 100))
def test_search_brackets_the_capacity(capacity: float, start: float) -> None:
    tried = search(lambda rate: rate <= capacity, start, probes=40)
    held = max((rate for rate in tried if rate <= capacity), default=None)
    broken = min((rate for rate in tried if rate > capacity), default=None)
    assert held is not None and broken is not None and held <= capacity < broken <= held * 1.05


@given(st.floats(0.5, 30))
def test_seven_probes_are_near(capacity: float) -> None:
    tried = search(lambda rate: rate <= capacity, 1.0, probes=7)
    assert len(tried) <= 7
    held = [rate for rate in tried if rate <= capacity]
    assert held and capacity / max(held) < 2.1


class OneAtATime:
    """A server that takes ``seconds`` for a request and answers one at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.turn = seconds, threading.Lock()
        self.free = 0.0

    def script(self, body: dict) -> list:
        now = time.perf_counter()
        self.free = max(self.free, now) + self.seconds
        return [self.free - now, *normal(body)]


def test_find_rate_finds_the_rate_of_a_server_with_a_known_capacity() -> None:
    """Service takes 40 ms, so 25 requests/s is the limit of any promise."""
    config = WorkloadConfig(num_prompts=24, input_len=4, output_len=2, max_concurrency=None)
    server = FakeServer(OneAtATime(0.04).script)
    with server.run() as url, session([Side("s", url=url)], IDS, lambda _: None) as running:
        found = find_rate(running, config, Promise(LatencyBounds(ttft=150)), probes=5)
    assert found.highest is not None and 5 < found.highest < 40
    assert found.lowest_broken is not None and found.highest < found.lowest_broken
    assert {len(probe.result.records("s")) for probe in found.probes} == {24}
    first, second = (probe.result.turns[0].records for probe in found.probes[:2])
    gaps = [[r.scheduled - a[0].scheduled for r in a] for a in (first, second)]  # type: ignore[operator]
    ratio = found.probes[1].rate / found.probes[0].rate
    assert gaps[0] == pytest.approx([gap * ratio for gap in gaps[1]], abs=1e-6)
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies)  # no probe repeats a prompt
    assert rate_table(found).row_count == len(found.probes)


def test_a_promise_may_be_claims_and_breaks_where_the_queue_grows() -> None:
    made = result_of(1, 40, lambda side, r, i: 0.5, sides=("a",))
    assert Promise(claims=parse("ttft_p50<600ms")).broken(made) == []
    assert "not shown" in Promise(claims=parse("ttft_p95<600ms")).broken(made)[0]
    growing = result_of(1, 40, lambda side, r, i: 1.0 + 25.0 * i, sides=("a",))
    (reason,) = Promise().broken(growing)
    assert "queue grows" in reason


@pytest.mark.parametrize(
    ("requests", "failed", "cell"), [(59, 0, "500 [500, 500]"), (58, 0, "not shown"), (58, 2, "not shown")]
)
def test_a_row_shows_a_p95_by_the_rule_of_the_other_tables(requests: int, failed: int, cell: str) -> None:
    made = result_of(1, requests, lambda side, r, i: 0.5, sides=("a",))
    made.turns[0].records.extend(broken(requests + i) for i in range(failed))
    assert cells(made, "a")[COLUMNS.index("TTFT p95 ms")] == cell
    assert made.shows("a", ("latency_ms", "ttft", "p95")) == (cell != "not shown")


def test_the_highest_rate_lies_below_every_broken_one() -> None:
    made = result_of(1, 4, lambda side, r, i: 0.5, sides=("a",))
    probes = [Probe(1.0, made, ()), Probe(2.0, made, ("late",)), Probe(4.0, made, ())]
    found = FoundRate("a", tuple(probes))
    assert (found.highest, found.lowest_broken) == (1.0, 2.0)
    assert found.line() == "a: 1 requests/s hold, 2 do not (late)"
    assert "no rate holds, not even 2" in FoundRate("a", (probes[1],)).line()
    assert "no higher rate was tried" in FoundRate("a", (probes[0],)).line()


def test_a_sweep_goes_from_one_client_to_saturation(tmp_path: Path) -> None:
    config = WorkloadConfig(num_prompts=10, input_len=4, output_len=2, max_concurrency=None)
    with (
        FakeServer(OneAtATime(0.01).script).run() as a,
        FakeServer(OneAtATime(0.02).script).run() as b,
        session([Side("a", url=a), Side("b", url=b)], IDS, lambda _: None) as running,
    ):
        found = sweep(running, config, LatencyBounds(ttft=500), rates=2)
    assert [point.label for point in found.points][::3] == ["synchronous", "all at once"]
    assert len(found.points) == 4 and sweep_table(found).row_count == 8
    found.save(tmp_path / "sweep.json")
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert saved["kind"] == "sweep" and [p["rate"] for p in saved["points"]][::3] == [None, None]


def test_a_server_without_answers_is_a_user_error() -> None:
    with (
        FakeServer(lambda body: ["{"]).run() as url,
        session([Side("s", url=url)], IDS, lambda _: None) as running,
        pytest.raises(UserError, match="no rate to start from"),
    ):
        find_rate(running, WorkloadConfig(num_prompts=4, input_len=4), Promise(LatencyBounds(ttft=1)))


@pytest.mark.parametrize("claim", ["ttft_mean<700ms", "output_throughput>=1", "ttft_p95<700ms"])
def test_a_claim_that_no_probe_can_show_is_refused_before_anything_is_sent(claim: str) -> None:
    server = FakeServer(normal)
    config = WorkloadConfig(num_prompts=10, input_len=4, output_len=2, max_concurrency=None)
    with server.run() as url, session([Side("s", url=url)], IDS, lambda _: None) as running:
        sent = len(server.bodies)
        with pytest.raises(UserError, match=r"single round of 10 requests: .* needed|needs 6 rounds, not 1"):
            find_rate(running, config, Promise(claims=parse(claim)))
        assert len(server.bodies) == sent


def test_a_held_p95_of_few_requests_is_a_doubt() -> None:
    few, many = (
        result_of(1, n, lambda side, r, i: 0.5, sides=("a",), slo=LatencyBounds(ttft=700)) for n in (10, 60)
    )
    (doubt,) = FoundRate("a", (Probe(1.0, few, ()),)).doubts()
    assert "a p95 of 10 requests shows no bound" in doubt
    assert FoundRate("a", (Probe(1.0, many, ()),)).doubts() == []


def test_a_promise_without_a_sample_is_broken() -> None:
    made = result_of(1, 5, lambda side, r, i: 0.5, sides=("a",), slo=LatencyBounds(tpot=50))
    for turn in made.turns:
        turn.records[:] = [replace(r, chunks=r.chunks[:1], output_tokens=1) for r in turn.records]
    (reason,) = Promise(LatencyBounds(tpot=50)).broken(made)
    assert "tpot is not measured" in reason


def test_a_sweep_goes_on_without_a_side_that_answers_nothing() -> None:
    config = WorkloadConfig(num_prompts=8, input_len=4, output_len=2, max_concurrency=None)
    with (
        FakeServer(OneAtATime(0.01).script).run() as a,
        FakeServer(lambda body: ["{"]).run() as b,
        session([Side("a", url=a), Side("b", url=b)], IDS, lambda _: None) as running,
    ):
        found = sweep(running, config, LatencyBounds(), rates=2)
        assert len(found.points) == 4 and not any(r.ok for r in found.points[1].result.records("b"))
        with pytest.raises(UserError, match="no rate to start from"):
            sweep(replace(running, sides=running.sides[1:]), config, LatencyBounds(), rates=2)

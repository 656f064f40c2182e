"""Rounds over real server processes: order, freezing, skipping, what is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import readme_table
from bench.peers import measure, workloads
from bench.peers.peer import Model, Peer
from bench.peers.process_group import members, peak_memory, used_avx512
from optkit.bench import workload
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError

SERVER = str(Path(__file__).parents[1] / "support" / "completions_server.py")
MODEL = Model("tiny", Path("nowhere"))
LOADS = {
    "short": WorkloadConfig(num_prompts=2, input_len=6, output_len=3),
    "clients": WorkloadConfig(num_prompts=3, input_len=4, output_len=2, max_concurrency=3),
}


class Fake(Peer):
    def __init__(self, name: str, *words: str) -> None:
        self.name, self.words = name, words

    def command(self, model: Model, port: int) -> list[str]:
        return [sys.executable, SERVER, str(port), *self.words]

    def settings(self, model: Model, url: str) -> dict[str, str]:
        return {"version": f"{self.name} 1"}


class Alone(Fake):
    batches = False


class Broken(Fake):
    def command(self, model: Model, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('out of luck')"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measure, "SETTLE", 0.0)


def measured(peers, rounds=2, skipped=None):
    lines = []
    run = measure.Run(MODEL, LOADS, rounds, range(500), lines.append)
    return run.measure(peers, skipped or {}), lines


def test_rounds_interleave_and_everything_is_recorded(tmp_path):
    result, lines = measured([Fake("a"), Fake("b")], skipped={"c": "not installed"})
    result.artifacts = ["a"]
    turns = [(t.side, t.round) for t in result.results["short"].turns]
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert all(t.load_average >= 0 and not t.problems for r in result.results.values() for t in r.turns)
    assert [len(t.records) for t in result.results["clients"].turns] == [3] * 4
    assert len(result.servers["a"].start_seconds) == 2 and result.servers["a"].peak_memory > 1 << 20
    assert "round 2 of 2, clients: b" in lines
    result.save(tmp_path / "peers.json")
    data = json.loads((tmp_path / "peers.json").read_text())
    assert data["skipped"] == {"c": "not installed"} and data["artifacts"] == ["a"]
    assert len(data["workloads"]["short"]["turns"][0]["records"][0]["chunks"]) == 3
    text = readme_table.peers_page(tmp_path)
    assert "Not measured: c (not installed)" in text and "Versions: a: a 1; b: b 1." in text


def test_a_server_that_does_not_start_or_answer_is_skipped_with_the_reason():
    result, lines = measured([Broken("broken"), Fake("failing", "fail"), Fake("a")], rounds=1)
    assert "out of luck" in result.skipped["broken"]
    assert "HTTP 500" in result.skipped["failing"]
    assert result.results["short"].sides == ["a"]
    assert any(line.startswith("broken: skipped, ") for line in lines)


def test_a_server_without_batches_skips_the_workloads_with_several_clients():
    result, _ = measured([Fake("a"), Alone("b")], rounds=1)
    assert result.results["short"].sides == ["a", "b"]
    assert result.results["clients"].sides == ["a"]


def test_a_server_is_started_at_most_as_often_as_said():
    run = measure.Run(MODEL, LOADS, 3, range(500), lambda line: None, starts=1)
    assert len(run.measure([Fake("a")], {}).servers["a"].start_seconds) == 1


def test_a_server_gets_the_variables_of_the_instruction_set(monkeypatch):
    commands = []
    started = measure.servers.started
    monkeypatch.setattr(
        measure.servers,
        "started",
        lambda command, port: (commands.append(command), started(command, port))[1],
    )
    side = Fake("a")
    side.isa = "avx2"
    measured([side], rounds=1)
    assert commands[0][0] == "env" and "OPTKIT_CPU_ISA=avx2" in commands[0]
    measured([Fake("a")], rounds=1)
    assert commands[1][0] == sys.executable


def test_a_run_waits_for_a_quiet_machine_but_not_for_ever(monkeypatch):
    loads, lines = iter([3.0, 1.0, 0.1]), []
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measure, "usable_cores", lambda: 2)
    monkeypatch.setattr(measure, "load_average", lambda: next(loads))
    measure.wait_until_quiet(lines.append)
    assert len(lines) == 2 and "load average 3.0" in lines[0]
    monkeypatch.setattr(measure, "load_average", lambda: 9.0)
    monkeypatch.setattr(measure, "QUIET_TIMEOUT", 0.0)
    measure.wait_until_quiet(lines.append)
    assert len(lines) == 2


def test_no_server_at_all_is_an_error():
    with pytest.raises(UserError, match="no server could be started"):
        measured([Broken("broken")])


def test_idle_servers_are_frozen_and_none_is_left(monkeypatch):
    states = []
    original = measure.client.run_workload

    def look(url, model, load):
        states.append(sorted(state(pid) for pid in groups))
        return original(url, model, load)

    groups = []
    started = measure.Run._first_token
    monkeypatch.setattr(measure.client, "run_workload", look)

    def remember(self, peer, stack, attempt):
        live, seconds = started(self, peer, stack, attempt)
        groups.append(live.group)
        return live, seconds

    monkeypatch.setattr(measure.Run, "_first_token", remember)
    measured([Fake("a"), Fake("b")], rounds=1)
    assert all("T" in seen for seen in states[-4:])  # one runs, the other is stopped
    assert all(not list(members(group)) for group in groups)


class Process:
    """A server process that runs, or has ended with ``returncode``."""

    pid = 1

    def __init__(self, returncode: int | None = None) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def awake(monkeypatch):
    """``awake(health answers, completions' errors, process)``: a server whose turn begins, and what is left over."""

    def turn(health, errors, process=None):
        healthy, records = iter(health), iter(errors)
        monkeypatch.setattr(measure, "thaw", lambda group: None)
        monkeypatch.setattr(measure, "freeze", lambda group: None)
        monkeypatch.setattr(measure, "AWAKE_TIMEOUT", 0.3)
        monkeypatch.setattr(measure.servers, "healthy", lambda url: next(healthy, False))
        monkeypatch.setattr(measure.client, "run_workload", lambda *_: [record(next(records, "no"))])
        live = measure.Live("a", measure.servers.RunningServer("http://x", process or Process()), "m")
        with live.turn() as problem:
            return problem, list(healthy), list(records)

    return turn


def record(error):
    chunks = [] if error else [Chunk(1.0, 1)]
    return RequestRecord(0, 0.0, chunks=chunks, done=2.0, error=error)


def test_a_turn_begins_when_health_and_a_completion_are_answered(awake):
    assert awake([False, False, True, True], ["HTTP 503", None]) == (None, [], [])


def test_a_server_that_does_not_wake_up_says_why(awake):
    assert awake([], [])[0] == "/health does not answer 200"
    assert awake([True] * 100, ["HTTP 503"] * 100)[0] == "a completion of one token fails: HTTP 503"
    assert awake([True], [None], Process(-9))[0] == "the server exited with code -9"


def test_the_reason_is_kept_with_the_round(monkeypatch, awake):
    awake([], [])  # the patches
    load = workload.build(LOADS["short"], range(500))
    live = measure.Live("a", measure.servers.RunningServer("http://x", Process()), "m")
    monkeypatch.setattr(measure.client, "run_workload", lambda *_: [record("gone")] * 2)
    turn = measure.take(live, 0, load)
    assert "did not answer: /health" in turn.problems[0] and len(turn.records) == 2


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_memory_is_the_sum_over_the_group(tmp_path):
    for pid, group, kib in (("10", 7, 100), ("11", 7, 50), ("12", 8, 1000)):
        entry = tmp_path / pid
        entry.mkdir()
        (entry / "stat").write_text(f"{pid} (a (b) c) S 1 {group} 7 0")
        (entry / "status").write_text(f"Name:\tx\nVmHWM:\t{kib} kB\n")
    (tmp_path / "13").mkdir()  # ended between the listing and the reading
    (tmp_path / "meminfo").write_text("")
    assert peak_memory(7, tmp_path) == 150 * 1024


@pytest.mark.parametrize(
    ("elapsed", "seen"), [([-1, -1], False), ([-1, 900], True), ([5000], False), ([], None)]
)
def test_avx512_counts_within_the_window(tmp_path, elapsed, seen):
    """A thread inherits the time of its parent, so 5 s ago is before a window of 1 s."""
    entry = tmp_path / "10"
    entry.mkdir()
    (entry / "stat").write_text("10 (a) S 1 7 7 0")
    for number, ms in enumerate(elapsed):
        task = entry / "task" / str(number)
        task.mkdir(parents=True)
        (task / "arch_status").write_text(f"AVX512_elapsed_ms:\t{ms}\n")
    assert used_avx512(7, 1.0, tmp_path) is seen


def test_quick_sends_one_request_a_client():
    counts = {name: config.num_prompts for name, config in workloads.quick(workloads.WORKLOADS).items()}
    assert counts == {"short": 1, "medium": 1, "long": 1, "clients": 8}


def test_warm_up_prompts_are_not_the_measured_ones():
    for config in workloads.WORKLOADS.values():
        assert workloads.warmup(config).seed != config.seed
        assert workloads.warmup(config).input_len == config.input_len


def test_every_figure_is_a_number_of_a_workload():
    assert {figure.workload for figure in workloads.FIGURES} == set(workloads.WORKLOADS)

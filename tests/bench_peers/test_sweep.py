"""Sweeps over real server processes: turns, left-out servers, what is saved and shown."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from bench import readme_table
from bench.peers import measure, sweep
from bench.peers.process_group import members
from optkit.bench.metrics import OPTKIT
from optkit.bench.records import Chunk, RequestRecord
from optkit.report.bench_file import read_benches
from tests.bench_peers.test_measure import MODEL, Alone, Broken, Fake, quick  # noqa: F401

LOAD = replace(sweep.LOAD, num_prompts=8, input_len=5, output_len=4)


def swept(peers, rounds=2, rates=2):
    skipped = {"c": "not installed"}
    return sweep.measure(MODEL, range(500), peers, skipped, lambda line: None, rounds, rates, LOAD)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr("optkit.bench.run.SETTLE", 0.0)


@pytest.fixture(scope="module")
def measured_once():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("bench.peers.measure", "optkit.bench.run"):
            patch.setattr(f"{module}.SETTLE", 0.0)
        return swept([Fake("a"), Fake("b")])


@pytest.fixture
def found(measured_once):
    """The sweep of two servers, in a copy."""
    return deepcopy(measured_once)


def test_every_server_is_measured_at_every_load_with_the_same_requests(no_pause):
    found = swept([Fake("a"), Fake("b"), Alone("alone"), Broken("broken")])
    assert found.sweep.sides == ("a", "b")
    assert found.sweep.points[0].rate is None and len(found.sweep.points) == 4
    for point in found.sweep.points:
        turns = point.result.turns
        assert [(turn.side, turn.round) for turn in turns] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
        assert {len(turn.records) for turn in turns} == {8} and not any(turn.problems for turn in turns)
    assert set(found.measured.skipped) == {"alone", "broken", "c"}
    assert "one request at a time" in found.measured.skipped["alone"]
    assert found.measured.servers["a"].peak_memory > 1 << 20


def test_the_other_servers_are_frozen_during_a_turn(no_pause, monkeypatch):
    groups, seen = [], []
    first_token, run_watched = measure.Run._first_token, measure.client.run_watched

    def remember(self, peer, stack, attempt):
        live, seconds = first_token(self, peer, stack, attempt)
        groups.append(live.group)
        return live, seconds

    def look(url, model, load, api_key=None, limit=None):
        states = [entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] for entry in every()]
        seen.append(states.count("T"))
        return run_watched(url, model, load, api_key, limit)

    def every():
        return [entry for group in groups for entry in members(group)]

    monkeypatch.setattr(measure.Run, "_first_token", remember)
    monkeypatch.setattr("optkit.bench.run.client.run_watched", look)
    swept([Fake("a"), Fake("b")], rounds=1)
    assert len(seen) >= 8 and set(seen[-8:]) == {1}
    assert not every()


def test_the_file_is_a_sweep_for_the_report_and_a_table_for_the_page(found, tmp_path):
    found.measured.artifacts = ["a"]
    found.save(tmp_path / "sweep-tiny.json")
    benches = read_benches(tmp_path / "sweep-tiny.json")
    assert len(benches) == 4 and benches[0].result.sides == ["a", "b"]
    saved = (tmp_path / "sweep-tiny.json").read_text()
    assert '"ttft"' in saved and "itl" not in saved  # the gaps between tokens were not kept
    text = readme_table.peers_page(tmp_path)
    assert "## Under load" in text and "5 tokens in, 4 out, 2 rounds of a load" in text
    assert text.count("| synchronous |") == text.count("| all at once |") == 2
    assert "Versions: a: a 1; b: b 1." in text and "Not measured: c (not installed)" in text


def test_the_page_counts_failed_requests_and_problems_of_the_whole_run(found, tmp_path):
    file = tmp_path / "sweep-tiny.json"

    def warnings():
        found.save(file)
        return int((re.findall(r"Warnings of this run: (\d+)", readme_table.peers_page(tmp_path)) or [0])[0])

    before, doubts = warnings(), found.sweep.doubts()
    found.sweep.points[1].result.turns[0].records[:2] = [
        RequestRecord(i, 0.5, error="HTTP 500") for i in (0, 1)
    ]
    found.measured.isa = "avx2"
    for name, used in (("a", False), ("b", True)):
        found.measured.servers[name].used_avx512 = used
    assert warnings() == before + 3 + len(found.sweep.doubts()) - len(doubts)


def test_a_kept_stream_has_its_ends_and_the_same_numbers():
    chunks = [Chunk(1.0, 1, True), Chunk(1.5, 1), Chunk(2.0, 1), Chunk(2.5, 1), Chunk(2.6, 0, True)]
    record = RequestRecord(0, 0.5, chunks=chunks, done=2.7)
    kept = sweep.ends(record)
    assert [chunk.time for chunk in kept.chunks] == [1.5, 2.5]
    for name in ("ttft", "tpot", "e2e"):
        assert OPTKIT[name].samples(kept) == OPTKIT[name].samples(record) != []
    failed = RequestRecord(1, 0.5, error="HTTP 500")
    assert sweep.ends(failed).chunks == [] and not sweep.ends(failed).ok


def test_the_command_takes_a_sweep(no_pause, tmp_path, monkeypatch, capsys):
    from bench.peers import __main__ as command

    assert command.parse(["--model", "m", "--sweep"]).save_result.name == "sweep-local.json"
    assert command.parse(["--model", "m", "--sweep"]).rounds == 2
    monkeypatch.setattr(command, "ready", lambda peers, model, install: ([Fake("a")], {}))
    monkeypatch.setattr(command, "find_model", lambda name, gguf: MODEL)
    monkeypatch.setattr(command, "load_tokenizer", lambda directory: None)
    monkeypatch.setattr(command.workload, "text_ids", lambda tokenizer: range(900))
    monkeypatch.setattr(command.readme_table, "main", lambda arguments: 0)
    file = tmp_path / "out.json"
    words = ["--model", "m", "--only", "llama.cpp-q8_0", "--sweep", "--quick", "--save-result", str(file)]
    assert command.main(words) == 0
    assert json.loads(file.read_text())["kind"] == "sweep"
    assert "| synchronous | a |" in capsys.readouterr().out
    assert Path(file).stat().st_size < 100_000
    assert command.main([*words[:-1], "/dev/full"]) == 2
    out = capsys.readouterr()
    assert "| synchronous | a |" in out.out and "error: /dev/full: can't be written: No space" in out.err
    monkeypatch.setattr(command, "find_model", lambda name, gguf: pytest.fail("measured"))
    assert command.main([*words[:-1], str(tmp_path)]) == 2

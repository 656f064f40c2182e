"""The best options of a peer: tried once over HTTP, kept, tried again when asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers import measure, peer, trials
from bench.peers.peer import Model, Peer
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError

SERVER = str(Path(__file__).parents[1] / "support" / "completions_server.py")


class Fake(Peer):
    """A server that answers with the option ``word`` = ``answer`` and fails with ``fail``."""

    def __init__(self, *words: str) -> None:
        self.name, self.words, self.started = "fake", words, []

    def candidates(self) -> list[dict[str, str]]:
        return [{"word": word} for word in self.words]

    def command(self, model: Model, port: int) -> list[str]:
        self.started.append(self.options["word"])
        return [sys.executable, SERVER, str(port), *(["fail"] if self.options["word"] == "fail" else [])]

    def settings(self, model: Model, url: str) -> dict[str, str]:
        return {"version": "1"}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "PEERS", tmp_path)
    monkeypatch.setattr(measure, "SETTLE", 0.0)
    monkeypatch.setattr(trials, "TRIAL", WorkloadConfig(num_prompts=1, input_len=6, output_len=3))
    monkeypatch.setattr(trials, "ROUNDS", 2)
    return Model("tiny", tmp_path)


def choose(side, model):
    trials.choose_options(side, model, range(500), lambda line: None)


def test_a_candidate_that_fails_is_recorded_and_not_chosen(model):
    side = Fake("fail", "answer")
    choose(side, model)
    assert side.options == {"word": "answer"}
    first, second = side.trials["candidates"]
    assert "HTTP 500" in first["failed"] and second["seconds"] > 0


def test_candidates_that_do_not_fit_together_run_one_after_another(model, monkeypatch):
    (model.directory / "model.safetensors").write_bytes(b"0" * 100)
    monkeypatch.setattr(trials, "TRIAL_ALONE", WorkloadConfig(num_prompts=1, input_len=4, output_len=2))
    groups, run = [], measure.Run.measure

    def measured(self, peers, skipped):
        groups.append((len(peers), self.workloads["trial"].input_len))
        return run(self, peers, skipped)

    monkeypatch.setattr(measure.Run, "measure", measured)
    for memory, expected in ((400, [(2, 6)]), (399, [(1, 4), (1, 4)])):
        monkeypatch.setattr(trials, "memory_bytes", lambda memory=memory: memory)
        groups.clear()
        side = Fake("fail", "answer")
        trials.forget([side], model)
        choose(side, model)
        assert groups == expected and side.options == {"word": "answer"}
        assert "HTTP 500" in side.trials["candidates"][0]["failed"]


def test_trials_are_made_once_for_each_instruction_set_and_again_after_forgetting(model):
    side = Fake("answer", "again")
    choose(side, model)
    count = len(side.started)
    assert count == 2
    choose(side, model)
    assert len(side.started) == count
    other = Fake("answer", "again")
    other.isa = "avx2"
    choose(other, model)
    assert len(other.started) == count
    trials.forget([side], model)
    choose(side, model)
    assert len(side.started) == 2 * count


def test_the_fastest_candidate_is_the_best():
    rows = [{"options": {"a": "1"}, "seconds": 2.0}, {"options": {"a": "2"}, "seconds": 1.0}]
    assert trials.best({"candidates": rows}, "x") == {"a": "2"}
    with pytest.raises(UserError, match="no set of options"):
        trials.best({"candidates": [{"options": {}, "failed": "no"}]}, "x")


def test_a_peer_without_candidates_needs_no_trial(model):
    side = Fake()
    choose(side, model)
    assert side.options == {} and not trials.trials_file(side, model).exists()

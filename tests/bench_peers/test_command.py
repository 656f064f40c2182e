"""The command line: which peers are chosen, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers import __main__ as command
from bench.peers.optkit_peer import Optkit
from bench.peers.peer import Model
from optkit.errors import UserError

MODEL = Model("tiny", Path("nowhere"))


def names(only: str | None, artifacts: list[str]) -> list[str]:
    return [peer.name for peer in command.chosen(only, command.artifact_peers(artifacts))]


def test_every_artifact_is_a_column_before_the_peers():
    assert names(None, ["a=x", "b=y/"]) == ["a", "b", *command.DEFAULT]
    assert names("vllm-w8a8,optkit", ["dir"]) == ["optkit", "vllm-w8a8"]
    assert names("transformers-fp32", []) == ["transformers-fp32"]


def test_a_peer_is_called_what_the_table_calls_it():
    assert [make("native").name for make in command.PEERS.values()] == list(command.PEERS)


def test_the_instruction_set_reaches_every_peer_and_names_another_file():
    artifacts = command.artifact_peers(["a=x"], "avx2")
    peers = command.chosen(",".join(["optkit", *command.PEERS]), artifacts, "avx2")
    assert [peer.isa for peer in peers] == ["avx2"] * (1 + len(command.PEERS))
    assert command.parse(["--model", "m", "--isa", "avx2"]).save_result.name == "peers-local-avx2.json"
    assert command.parse(["--model", "m"]).save_result.name == "peers-local.json"


def test_a_run_has_eight_rounds_by_default():
    assert command.parse(["--model", "m"]).rounds == 8


@pytest.mark.parametrize(
    ("only", "artifacts", "message"),
    [
        ("vllm", [], "did you mean"),
        (None, [], "no artifact to measure"),
        (None, ["x", "y"], "two artifacts have one name"),
        (None, ["vllm-fp32=x"], "named like a peer"),
    ],
)
def test_mistakes(only, artifacts, message):
    with pytest.raises(UserError, match=message):
        names(only, artifacts)


def test_workloads_are_chosen_by_name():
    assert list(command.chosen_workloads("medium,short")) == ["short", "medium"]
    assert command.chosen_workloads("long")["long"].input_len == 1900
    with pytest.raises(UserError, match="did you mean"):
        command.chosen_workloads("mediun")


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert command.main(["--model", "smollm2-135m", "--only", "nobody"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_peer_that_is_not_ready_is_skipped_with_the_reason(tmp_path, capsys):
    peers = [Optkit("a", tmp_path / "missing"), Optkit("b", tmp_path)]
    (tmp_path / "optkit").mkdir()
    (tmp_path / "optkit" / "manifest.json").write_text(json.dumps({}))
    usable, skipped = command.ready(peers, MODEL, install=False)
    assert [peer.name for peer in usable] == ["b"]
    assert skipped["a"].startswith("no such artifact")
    assert "a: skipped, no such artifact" in capsys.readouterr().err


class Choosy(Optkit):
    def candidates(self):
        return [{"a": "1"}, {"a": "2"}]


def test_a_peer_without_a_working_candidate_is_skipped_with_the_reason(monkeypatch, tmp_path):
    def fail(peer, model, ids, progress):
        raise UserError("no set of options answered")

    monkeypatch.setattr("bench.peers.peer.PEERS", tmp_path)
    monkeypatch.setattr(command.trials, "choose_options", fail)
    monkeypatch.setattr(command, "wait_until_quiet", lambda progress: None)
    usable, skipped = command.tuned([Choosy("a", tmp_path)], MODEL, range(9), retune=True)
    assert not usable and skipped == {"a": "no set of options answered"}


def test_a_smoke_test_takes_the_first_candidate(tmp_path):
    peers = command.untuned([Choosy("a", tmp_path), Optkit("b", tmp_path)])
    assert [dict(peer.options) for peer in peers] == [{"a": "1"}, {}]


def test_without_install_a_missing_environment_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.peers.peer.PEERS", tmp_path)
    _, skipped = command.ready(
        command.chosen("vllm-w8a8,llama.cpp-q8_0,openvino-q8_0", []), MODEL, install=False
    )
    assert set(skipped) == {"vllm-w8a8", "llama.cpp-q8_0", "openvino-q8_0"}
    assert all("not installed" in why for why in skipped.values())

"""optkit tune: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.api.tune import TuneReport
from optkit.cli import main
from optkit.cli import tune as command


def report(held: bool) -> TuneReport:
    reasons = () if held else ("order 1: ttft_p95<1ms: 59 of 59 requests miss it",)
    lines = ("Objective: ttft_p95<1ms.", "Held: ..." if held else "NOT SHOWN: ...")
    return TuneReport(
        held,
        "ttft-cpu",
        {"max_num_seqs": 4},
        "ttft_p95 9 ms",
        reasons,
        (),
        (Path("tuned/recipe.yaml"),),
        9.0,
        lines,
    )


@pytest.mark.parametrize(("held", "code"), [(True, 0), (False, 3)])
def test_tune_prints_the_evidence_and_exits_by_the_result(
    held: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, object] = {}

    def tune(model: str, slo: str, out: Path, **options: object) -> TuneReport:
        given.update(options, model=model, slo=slo, out=out)
        return report(held)

    monkeypatch.setattr(command, "search", tune)
    words = ["tune", "m", "--slo", "ttft_p95<1ms@4rps", "--budget", "5m", "-r", "a", "-r", "b", "-o", "d"]
    assert main.run(words) == code
    assert (given["recipes"], given["budget"], given["out"]) == (["a", "b"], "5m", Path("d"))
    out = capsys.readouterr().out
    assert ("Held" if held else "NOT SHOWN") in out and "wrote tuned/recipe.yaml" in out
    assert main.run([*words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["held"] is held and found["options"] == {"max_num_seqs": 4}


@pytest.mark.parametrize("words", [["m"], ["m", "--slo", "ttft"], ["m", "--slo", "ttft<7", "--budget", "x"]])
def test_tune_exits_with_2_when_arguments_are_wrong(words: list[str], tmp_path: Path) -> None:
    assert main.run(["tune", *words, "-o", str(tmp_path / "out")]) == 2


def test_an_interrupted_tuning_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(*_args: object, **_options: object) -> TuneReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "search", tune)
    assert main.run(["tune", "m", "--slo", "ttft:7", "-o", "d"]) == 130
    assert "the same command resumes" in capsys.readouterr().err

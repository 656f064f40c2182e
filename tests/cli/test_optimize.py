"""optkit optimize: the arguments for the pipeline, the dry run, and user errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optkit.cli.main import run
from optkit.pipeline import driver, dry_run
from tests.support.sample_artifact import sample_run

Output = pytest.CaptureFixture[str]
PLAN: dict[str, Any] = {
    "notes": ["an adapter"],
    "estimate": {"line": "about 5 minutes"},
    "target": {"name": "cpu", "source": "measured"},
    "baseline": {"prefill 128": 0.5},
    "passes": [
        {
            "name": "int8",
            "sites": ["a", "b"],
            "skips": [{"count": 2, "reason": "on the ignore list", "first": "lm_head"}],
            "predicted": {"prefill 128": [0.5, 0.25]},
        }
    ],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the pipeline; the list has the arguments of each call."""
    found: list[dict[str, Any]] = []

    def optimize(model: str, recipe: Any, out: Path, **options: Any) -> Any:
        found.append({"model": model, "recipe": recipe, "out": out} | options)
        return sample_run()

    monkeypatch.setattr(driver, "optimize", optimize)
    monkeypatch.setattr(dry_run, "dry_run", lambda *arguments: PLAN)
    return found


def test_optimize_passes_recipe_overrides_and_options_on(calls: list[dict[str, Any]], capsys: Output) -> None:
    words = ["optimize", "some-model", "-r", "ttft-cpu", "-o", "out", "--force", "--quality-tokens", "2048"]
    assert run([*words, "--set", "runtime.max_num_seqs=4", "--json"]) == 0
    (call,) = calls
    assert (call["model"], call["out"], call["force"], call["final_tokens"]) == (
        "some-model",
        Path("out"),
        True,
        2048,
    )
    assert call["recipe"].name == "ttft-cpu" and call["recipe"].runtime.max_num_seqs == 4
    assert json.loads(capsys.readouterr().out)["artifact"] == "out"


def test_optimize_names_the_output_after_the_recipe_when_out_is_missing(calls: list[dict[str, Any]]) -> None:
    assert run(["optimize", "some-model", "-r", "baseline", "--json"]) == 0
    assert calls[0]["out"] == Path("baseline-artifact")


def test_optimize_prints_the_table_and_the_next_command(calls: list[dict[str, Any]], capsys: Output) -> None:
    assert run(["optimize", "some-model", "-r", "baseline", "-o", "out"]) == 0
    shown = capsys.readouterr().out
    assert "int8" in shown
    assert shown.endswith("wrote out\nnext: optkit serve out\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_optimize_exits_with_3_when_the_artifact_misses_a_bound(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    missed = replace(sample_run(), missed_bounds="prefill speedup 1.200 is below 2.000")
    monkeypatch.setattr(driver, "optimize", lambda *arguments, **options: missed)
    assert run(["optimize", "some-model", "-r", "baseline", "-o", "out", *["--json"] * as_json]) == 3
    assert "prefill speedup 1.200 is below 2.000" in capsys.readouterr().out


def test_optimize_prints_sites_skips_and_predictions_when_dry_run_is_given(
    calls: list[dict[str, Any]], capsys: Output
) -> None:
    assert run(["optimize", "some-model", "-r", "baseline", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert calls == []
    assert "source: an adapter" in shown and "about 5 minutes" in shown
    assert "int8: 2 sites" in shown
    assert "skips 2x: on the ignore list (first: lm_head)" in shown
    assert "+ int8" in shown and "500.00" in shown and "250.00" in shown  # milliseconds


def test_dry_run_says_that_the_run_would_be_refused(
    calls: list[dict[str, Any]], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAN["estimate"], "refusal", "32.0 GB of weights [too many]")
    assert run(["optimize", "some-model", "-r", "baseline", "--dry-run"]) == 0
    assert "would be refused: 32.0 GB of weights [too many]" in " ".join(capsys.readouterr().out.split())


def test_dry_run_says_at_which_points_there_is_no_prediction(
    calls: list[dict[str, Any]], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAN, "unpredicted", ["decode@9"])
    assert run(["optimize", "some-model", "-r", "baseline", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no prediction for decode@9: the model is too large" in shown and "predicted, ms" in shown
    monkeypatch.setitem(PLAN, "baseline", {})
    assert run(["optimize", "some-model", "-r", "baseline", "--dry-run"]) == 0
    assert "predicted, ms" not in capsys.readouterr().out


def test_optimize_exits_with_2_when_the_recipe_is_unknown(
    calls: list[dict[str, Any]], capsys: Output
) -> None:
    assert run(["optimize", "some-model", "-r", "ttft-cp"]) == 2
    assert "did you mean 'ttft-cpu'" in capsys.readouterr().err
    assert calls == []

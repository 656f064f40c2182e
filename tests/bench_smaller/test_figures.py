"""The figures of smaller models on a tiny model: each runs, and a missed bound is an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench.smaller
from bench.figures import figures
from bench.smaller import _tries, refit
from tests.support.model_directory import save_model
from tests.support.target import TARGET


def rows(*losses: float) -> dict[str, dict[str, Any]]:
    return {str(n): {"seconds": 10.0, "kl_mean": loss} for n, loss in enumerate(losses)}


@pytest.mark.parametrize(("left", "code"), [(0.5, 0), (0.7, 1)])
def test_a_refit_that_leaves_too_much_is_an_exit_code(
    left: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_tries, "run", lambda given, wanted: rows(0.2, 0.2 * left))
    assert refit.main(["some-model"]) == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


def test_every_figure_is_found() -> None:
    assert {"refit", "layers", "sparsity"} <= figures(bench.smaller).keys()


def test_a_figure_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tries, "get_target", lambda name: TARGET)
    model = save_model(tmp_path / "model")
    given = _tries.parser("refit", None).parse_args(
        [str(model), "--tokens", "256", "--threads", "1", "--save-result", str(tmp_path / "result.json")]
    )
    calibration = {"samples": 2, "length": 32}
    tried = {
        "cut": {"prune_ffn": {"ffn": 0.4, "multiple": 32, "calibration": calibration}},
        "sparse": {"prune_2_4": {"calibration": calibration}},
    }
    found = _tries.run(given, tried)
    saved = json.loads((tmp_path / "result.json").read_text())["tries"]
    assert saved.keys() == found.keys() and all(row["kl_mean"] > 0 for row in saved.values())

"""``optkit profile``: tables, JSON and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.cli.main import run
from optkit.evaluation import profiled
from optkit.kernels.cpu import native
from tests.support.recorded import tiny_report

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
Output = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each profile; the report is that of a tiny model."""
    found: list[tuple[Any, ...]] = []

    def profile(*given: Any) -> Any:
        found.append(given[:5])
        return tiny_report()

    monkeypatch.setattr(profiled, "profile", profile)
    return found


def test_command_prints_a_table_for_each_phase_and_writes_files(
    asked: list[Any], tmp_path: Path, capsys: Output
) -> None:
    given = [
        "--prompt-tokens",
        "20",
        "--context",
        "30",
        "--steps",
        "1",
        "--sequences",
        "4",
        "-o",
        str(tmp_path / "out"),
    ]
    assert run(["profile", "artifact", *given]) == 0
    assert asked == [(Path("artifact"), 20, 30, 1, 4)]
    text = capsys.readouterr().out
    assert "prefill of 40 tokens" in text and "decode of 1 sequence" in text
    for row in ("layers.*.mlp.down_proj", "sampling", "between ops", "packing the batch"):
        assert text.count(row) == 2, row
    assert text.count("wrote ") == len(list((tmp_path / "out").iterdir())) == 4


def test_json_is_the_report_alone(asked: list[Any], capsys: Output) -> None:
    assert run(["profile", "artifact", "--json"]) == 0
    assert asked == [(Path("artifact"), 512, 512, 3, 1)]
    data = json.loads(capsys.readouterr().out)
    assert set(data["phases"]) == {"prefill", "decode"} and data["files"] == []
    assert data["phases"]["prefill"]["rows"][0]["lost"] >= data["phases"]["prefill"]["rows"][1]["lost"]


@pytest.mark.parametrize(
    "option", [["--steps", "0"], ["--prompt-tokens", "0"], ["--context", "x"], ["--sequences", "0"]]
)
def test_wrong_numbers_are_usage_errors(asked: list[Any], option: list[str]) -> None:
    assert run(["profile", "artifact", *option]) == 2 and not asked


def test_a_directory_that_cannot_be_made_is_refused_before_the_measurement(
    asked: list[Any], tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["profile", "artifact", "-o", str(tmp_path / "file")]) == 2 and not asked
    assert "is no directory" in capsys.readouterr().err

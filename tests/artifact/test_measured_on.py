"""The notice for an artifact whose passes were measured on another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.artifact import measured_on
from optkit.artifact.manifest import CANDIDATES


def artifact(directory: Path, report: object) -> Path:
    (directory / "optkit").mkdir()
    (directory / "optkit" / "report.json").write_text(json.dumps(report))
    return directory


def test_other_kernels_give_a_notice_with_both_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = artifact(tmp_path, {"machine": {"cpu": "Big CPU", "kernels": "avx512_vnni"}})
    monkeypatch.setattr(measured_on, "kernels_here", lambda: "avx2")
    monkeypatch.setattr(measured_on, "cpu_model", lambda: "Small CPU")
    line = measured_on.notice(made)
    assert line is not None
    for word in ("avx512_vnni", "Big CPU", "avx2", "Small CPU", "optkit optimize"):
        assert word in line


def test_another_processor_with_the_same_kernels_gives_a_notice(tmp_path: Path) -> None:
    made = artifact(tmp_path, {"machine": measured_on.this_machine() | {"cpu": "Big CPU"}})
    line = measured_on.notice(made)
    assert line is not None and "Big CPU" in line


def test_the_same_machine_gives_no_notice(tmp_path: Path) -> None:
    made = artifact(tmp_path, {"machine": measured_on.this_machine()})
    assert measured_on.notice(made) is None


@pytest.mark.parametrize(
    "report",
    [{}, [], {"machine": None}, {"machine": {}}, {"machine": {"cpu": 1, "kernels": "avx2"}},
     {"machine": {"cpu": "a\nb", "kernels": "avx2"}}],
)  # fmt: skip
def test_a_report_without_a_machine_gives_no_notice(report: object, tmp_path: Path) -> None:
    assert measured_on.notice(artifact(tmp_path, report)) is None


def test_a_missing_report_gives_no_notice(tmp_path: Path) -> None:
    assert measured_on.notice(tmp_path) is None


def test_recipes_without_candidates_get_the_general_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = artifact(tmp_path, {"machine": {"cpu": "Big CPU", "kernels": "another"}})
    assert measured_on.advice(made) == (
        "optkit optimize measures again on this machine and may keep other passes"
    )
    assert not measured_on.is_undecided(made)


def test_the_predicted_choice_is_kept_for_these_candidates_and_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    made = artifact(tmp_path, {"machine": {"cpu": "Big CPU", "kernels": "another"}})
    (made / CANDIDATES).write_text("{}")
    assert measured_on.is_undecided(made)
    measured_on.keep_sentence(made, "the same\x1b[31m here")
    assert measured_on.advice(made) == "the same\\x1b[31m here"
    assert not measured_on.is_undecided(made)
    (made / CANDIDATES).write_text('{"places": {}}')
    assert measured_on.is_undecided(made)
    monkeypatch.setattr(measured_on, "kernels_here", lambda: "another")
    monkeypatch.setattr(measured_on, "cpu_model", lambda: "Big CPU")
    assert measured_on.notice(made) is None

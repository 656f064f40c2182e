"""Saved plans, profiles and tunings: what the commands write is read, anything else is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.report.saved_results import (
    Result,
    SavedPlan,
    SavedProfile,
    SavedTuning,
    read_result,
    read_results,
)
from tests.support.recorded import tiny_report
from tests.support.saved_results import plan_file, profile_file, tuning_file, written

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def no_constant(text: str) -> None:
    raise ValueError(text)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan_file(tmp_path, monkeypatch)
    found, data = read_result(SavedPlan, file), json.loads(file.read_text(), parse_constant=no_constant)
    assert [row.seconds for row in found.steps] == [row["seconds"] for row in data["steps"]]
    assert found.replicas is not None and found.replicas.replicas == 1
    assert found.machine.title == data["machine"]["title"] and found.memory.fits


@needs_native
def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = read_result(SavedProfile, profile_file(tmp_path))
    assert [found.phases[p.phase].seconds for p in tiny_report().phases] == [
        p.seconds for p in tiny_report().phases
    ]


def test_a_tuning_is_read_with_its_measured_runs(tmp_path: Path) -> None:
    found = read_result(SavedTuning, tuning_file(tmp_path))
    json.loads((tmp_path / "trials.json").read_text(), parse_constant=no_constant)
    assert found.held and found.chosen == "recipe ttft-cpu, max_num_seqs=4"
    assert [row[:3] for row in found.measured] == [
        ("race round 0 ttft-cpu", "59", "ttft_p95 453 ms"),
        ("confirm 0 part 0 ttft-cpu", "59", "ttft_p95 453 ms"),
    ]


@pytest.mark.parametrize("kind", [SavedPlan, SavedProfile, SavedTuning])
@pytest.mark.parametrize("data", [{}, {"a": float("nan")}, {"steps": []}, {"phases": {}}, {"trials": 3}])
def test_another_file_is_named_with_the_command_that_makes_one(
    kind: type[Result], data: Any, tmp_path: Path
) -> None:
    file = written(tmp_path / "foreign.json", data)
    with pytest.raises(UserError, match=r"foreign\.json: no result of optkit") as error:
        read_result(kind, file)
    assert kind.COMMAND in error.value.line() and "\n" not in error.value.line()


def test_no_file_is_one_line_and_no_option_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_results(SavedPlan, [tmp_path / "none"])
    assert read_results(SavedPlan, None) == []

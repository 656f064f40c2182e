"""What a result says of its machine, and what it keeps to itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optkit.bench.environment import busy, environment, public


def test_public_makes_paths_relative(tmp_path: Path) -> None:
    assert public(f"--out={tmp_path}/a/b.json", tmp_path) == "--out=a/b.json"
    assert public(f"{tmp_path} {Path.home()}/x {sys.executable}", tmp_path) == ". ~/x python"
    assert public("a/b", Path("/")) == "a/b"


def test_environment_has_no_local_paths_in_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["/x/bin/optkit", "bench", "a", "--save-result", str(tmp_path / "r.json")]
    )
    assert environment()["command"] == ["optkit", "bench", "a", "--save-result", "r.json"]


def test_environment_names_the_variables_that_limit_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CPU_ISA", "avx2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    limits = environment()["isa_env"]
    assert limits["OPTKIT_CPU_ISA"] == limits["ATEN_CPU_CAPABILITY"] == "avx2"
    assert "ONEDNN_MAX_CPU_ISA" not in limits


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"cpu_in_use": 0.1, "load_average": 1.9, "cores": 2}, None),  # of what ended just before
        ({"cpu_in_use": 0.4, "load_average": 0.0, "cores": 2}, "40% of the processors in use"),
        ({"load_average": 0.4, "cores": 2}, None),
        ({"cpu_in_use": None, "load_average": 0.6, "cores": 2}, "load average 0.6 on 2 cores"),
        ({}, None),
    ],
)
def test_a_busy_machine_is_one_with_other_processes(facts: dict[str, object], line: str | None) -> None:
    found = busy(facts)
    assert found is None if line is None else line in (found or "")

"""optkit doctor: facts as JSON and as a table."""

from __future__ import annotations

import json

import pytest

from optkit import __version__
from optkit.cli import main


def test_doctor_prints_json_and_a_table_of_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["optkit"] == __version__
    assert facts["packages"]["torch"]
    assert facts["target"]["source"] == "measured"
    assert main.run(["doctor"]) == 0
    assert "ceilings" in capsys.readouterr().out


def test_doctor_names_the_variables_that_hold_libraries_beside_that_of_the_native_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CPU_ISA", "portable")
    monkeypatch.setenv("COLUMNS", "400")
    assert main.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "OPTKIT_CPU_ISA does not hold libraries: ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA" in shown

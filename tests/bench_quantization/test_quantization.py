"""The script that compares quantizers: the command of each result, and the file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quantization import command, save


def test_command_has_the_options_of_the_process_and_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["x", "model", "--try", "int8: {}", "--tokens", "512", "--try", "rtn: {}"]
    monkeypatch.setattr("sys.argv", argv)
    assert command("rtn: {}") == "python -m bench.quantization model --tokens 512 --try 'rtn: {}'"


def test_save_replaces_the_row_of_the_same_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "model"])
    for number, text in enumerate(("int8: {}", "rtn: {}", "int8: {}")):
        save(tmp_path / "file.json", "model", {"passes": text, "without": [], "tokens": 6, "kl_mean": number})
    results = json.loads((tmp_path / "file.json").read_text())["results"]
    assert [(row["passes"], row["kl_mean"]) for row in results] == [("rtn: {}", 1), ("int8: {}", 2)]

"""Figures of long answers on a fake engine; their numbers say nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.long import generation


@pytest.mark.usefixtures("faked_artifact")
def test_long_answers_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "generation.json"
    assert generation.main(["x", "--tokens", "20", "--prompts", "1", "--save-result", str(file)]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["different answers"] == 0
    assert result["greedy: tokens"] == 20
    assert 0 < result["greedy: distinct-4"] <= 1

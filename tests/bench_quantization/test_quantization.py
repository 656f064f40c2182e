"""The script that compares quantizers: stored reference logits, and the command of each result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.quantization import StoredLogits, command, save
from optkit.evaluation.quality import compare_many

WINDOWS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
VOCABULARY = 11


class Noise:
    """Random logits, different in each window."""

    def logits(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for window in windows:
            yield torch.randn(len(window), VOCABULARY, generator=generator)


def test_stored_logits_are_those_of_the_source_as_often_as_asked(tmp_path: Path) -> None:
    stored = StoredLogits(tmp_path / "logits", VOCABULARY, WINDOWS)
    stored.fill(Noise())
    for _ in range(2):
        for read, expected in zip(stored.logits(WINDOWS), Noise().logits(WINDOWS), strict=True):
            assert torch.equal(read, expected)
    assert (tmp_path / "logits").stat().st_size == 4 * VOCABULARY * 9
    report = compare_many(stored, {"same": Noise()}, WINDOWS)["same"]
    assert report.kl_mean.value == 0 and report.tokens == 6


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

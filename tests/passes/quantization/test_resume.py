"""Stopped passes: the next run continues after the finished groups and gives the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.passes import load
from optkit.passes.quantization import resume
from tests.support.correlated import FUSIONS, TEXT, correlated
from tests.support.graphs import (
    CONTEXT,
    apply,
    checkpoint,
)


class Stopped(BaseException):
    """As abrupt as a kill: nothing catches it."""


def stop_after(patch: pytest.MonkeyPatch, writes: int) -> None:
    """Stop at a write of finished work, ``writes`` writes from now."""
    original, left = resume.write, [writes]

    def write(file: Path, tensors: Any) -> None:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        original(file, tensors)

    patch.setattr(resume, "write", write)


GPTQ = ("gptq", {"scheme": "W4A8", "group_size": 32})
AWQ = ("awq", {"scheme": "W4A16", "group_size": 32})
MIXED = ("mixed_precision", {"schemes": ["W4A8:32", "W8A8:32"], "bits": 6.5, "sensitivity_tokens": 32})


@pytest.mark.parametrize(
    ("row", "options", "stop"),
    [
        (*GPTQ, 1),
        (*AWQ, 9),
        (*MIXED, 9),
        *(pytest.param(*more, marks=pytest.mark.soak) for more in ((*GPTQ, 9), (*AWQ, 1), (*MIXED, 1))),
    ],
)
def test_stopped_pass_continues_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, options: dict[str, Any], stop: int
) -> None:
    def run(place: Path) -> tuple[dict[str, Tensor], int]:
        graph = correlated("llama").clone()
        for fusion in FUSIONS:
            apply(graph, fusion)
        told: list[str] = []

        def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
            if part:
                told.append(text)

        pass_class = load(row)
        optimization = pass_class(pass_class.Config.model_validate(options | {"calibration": TEXT}))
        context = replace(CONTEXT, workspace=place, progress=progress)
        optimization.apply(graph, optimization.check(graph, context), context)
        return checkpoint(graph), len(told)

    expected, worked = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped")
    found, rest = run(tmp_path / "stopped")
    assert rest < worked or (row, stop) == ("awq", 1)  # before the first attention nothing is put aside
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    again, nothing = run(tmp_path / "stopped")
    assert nothing <= (2 if row == "awq" else 0)  # what came after the last walk that was put aside
    assert all(torch.equal(again[key], value) for key, value in expected.items())


def test_finished_groups_end_before_a_damaged_solution(tmp_path: Path) -> None:
    finished = resume.FinishedGroups(tmp_path, "codes")
    for index in range(3):
        finished.save(index, {"codes": torch.full((64,), index)})
    assert finished.count() == 3 and torch.equal(finished.load(1)["codes"], torch.ones(64, dtype=torch.int64))
    file = finished.solution_file(1)
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert finished.count() == 1
    finished.save(1, {"codes": torch.ones(64)})
    assert finished.count() == 3

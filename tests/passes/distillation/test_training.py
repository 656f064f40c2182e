"""Training within a budget: nearer to the teacher, and the same weights where a killed run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optkit.graph.ir import Graph
from optkit.passes.base import no_progress
from optkit.passes.distillation.differentiable import Differentiable
from optkit.passes.distillation.teacher import Teacher
from optkit.passes.distillation.training import Training, mean_divergence
from tests.support.graphs import apply, captured, dense, random_ids

WINDOWS = [ids.tolist() for ids in random_ids([24] * 6)]


class Clock:
    """A second passes at each look."""

    def __init__(self, stop: int | None = None) -> None:
        self.now, self.stop = 0, stop

    def __call__(self) -> float:
        self.now += 1
        if self.stop is not None and self.now > self.stop:
            raise KeyboardInterrupt
        return float(self.now)


def cut() -> Graph:
    graph = captured("llama")
    apply(graph, "prune_ffn", ffn=0.3, multiple=32)
    return graph


def logits(window: list[int]) -> Tensor:
    return 4 * dense(captured("llama"), torch.tensor(window))  # sharper than a random model's


def training(seconds: float, directory: Path | None = None, stop: int | None = None) -> Training:
    student = Differentiable(cut(), rank=8)
    teacher = Teacher(logits, WINDOWS, 32, None)
    return Training(student, teacher, range(5), seconds, 1e-2, directory, clock=Clock(stop))


def test_a_student_comes_nearer_to_the_teacher() -> None:
    made = training(40)
    before = mean_divergence(made.student, made.teacher, range(5))
    done = made.run(no_progress, "x")
    assert done.steps == 40 and mean_divergence(made.student, made.teacher, range(5)) < 0.7 * before


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.passes.distillation.training.SAVE_SECONDS", 1.0)
    whole = training(20)
    whole.run(no_progress, "x")
    with pytest.raises(KeyboardInterrupt):
        training(20, tmp_path, stop=9).run(no_progress, "x")
    again = training(20, tmp_path)
    done = again.run(no_progress, "x")
    assert done.steps == 20 and again.clock.now < 15  # type: ignore[attr-defined]
    for first, second in zip(whole.student.parameters(), again.student.parameters(), strict=True):
        assert torch.equal(first, second)


def test_each_window_comes_once_in_a_turn() -> None:
    made = training(1)
    turns = [[made.window(5 * turn + place) for place in range(5)] for turn in range(3)]
    assert all(sorted(turn) == list(range(5)) for turn in turns) and turns[0] != turns[1]

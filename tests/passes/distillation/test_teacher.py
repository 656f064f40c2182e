"""A teacher on disk: computed once, and the divergence beside torch's own on the collapsed vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from optkit.passes.distillation.teacher import Teacher, distribution, divergence

GENERATOR = torch.Generator().manual_seed(6)


def collapsed(logits: Tensor, ids: Tensor) -> Tensor:
    """Probabilities [L, top + 1] in float64: of ``ids``, and of all others together."""
    p = logits.double().softmax(-1)
    known = p.gather(1, ids)
    others = p.scatter(1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([known, others], dim=1)


def test_the_divergence_is_torchs_with_the_rest_as_one_token() -> None:
    teacher, student = (3 * torch.randn(9, 50, generator=GENERATOR) for _ in range(2))
    kept = distribution(teacher, 8)
    ids = kept["ids"].long()
    expected = torch.nn.functional.kl_div(
        collapsed(student, ids).log(), collapsed(teacher, ids), reduction="batchmean"
    )
    found = divergence(ids, kept["log_probabilities"].float(), student)
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=2e-3)  # float16 log probabilities
    whole = torch.nn.functional.kl_div(
        student.double().log_softmax(-1), teacher.double().softmax(-1), reduction="batchmean"
    )
    assert found < whole
    own = divergence(ids, kept["log_probabilities"].float(), teacher)
    assert abs(float(own)) < 1e-3


def test_windows_are_computed_once(tmp_path: Path) -> None:
    windows, asked = [[1, 2, 3], [4, 5]], list[list[int]]()

    def logits(window: list[int]) -> Tensor:
        asked.append(window)
        return torch.randn(len(window), 20, generator=torch.Generator().manual_seed(len(window)))

    for directory, count in ((None, 2), (tmp_path, 2), (tmp_path, 0)):
        asked.clear()
        teacher = Teacher(logits, windows, 4, directory)
        first = [teacher(index) for index in (1, 0, 1)]
        assert len(asked) == count and all(
            torch.equal(*pair) for pair in zip(first[0], first[2], strict=True)
        )
    ids, values = first[1]
    assert ids.shape == values.shape == (3, 4) and bool((values[:, :-1] >= values[:, 1:]).all())

"""2:4 sparsity: the pattern, and the error that each way of choosing leaves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from optkit.kernels.two_four import is_two_four
from optkit.passes.rewriting.two_four import kept_of_four, magnitude, sparsegpt, wanda

GENERATOR = torch.Generator().manual_seed(11)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def correlated(tokens: int, k: int) -> Tensor:
    """Activations of unlike size, some of them alike."""
    return random(tokens, k // 2) @ random(k // 2, k) * torch.linspace(0.1, 3, k) + 0.1 * random(tokens, k)


def error(x: Tensor, weight: Tensor, pruned: Tensor) -> float:
    return float(((weight - pruned) @ x.T).double().square().sum())


def test_the_two_largest_of_four_are_kept() -> None:
    score = random(5, 32).abs()
    kept = kept_of_four(score)
    for row, marks in zip(score.view(-1, 4), kept.view(-1, 4), strict=True):
        best = max(itertools.combinations(range(4), 2), key=lambda pair: float(row[list(pair)].sum()))
        assert tuple(marks.nonzero().flatten().tolist()) == best
    assert kept_of_four(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


def test_each_way_gives_the_pattern_and_better_ways_less_error() -> None:
    weight, independent = random(24, 64), random(400, 64)
    independent *= torch.linspace(0.05, 3, 64)[torch.randperm(64, generator=GENERATOR)]
    for x in (independent, correlated(400, 64)):
        hessian = x.T @ x / len(x)
        found = [magnitude(weight), wanda(weight, hessian), sparsegpt(weight, hessian, 0.01)]
        assert all(is_two_four(pruned) and (pruned != 0).sum() == weight.numel() // 2 for pruned in found)
        errors = [error(x, weight, pruned) for pruned in found]
        if x is independent:  # a channel's size tells its weight, and nothing can be corrected
            assert errors[1] < 0.9 * errors[0] and errors[2] < 1.1 * errors[1]
        else:
            assert errors[2] < 0.8 * min(errors[:2])


def test_sparsegpt_corrects_as_well_as_least_squares_in_the_last_columns() -> None:
    """With a diagonal hessian nothing can be corrected, and the choice is that of wanda."""
    weight, scale = random(8, 32), torch.linspace(0.5, 2, 32)
    diagonal = torch.diag(scale.square())
    torch.testing.assert_close(
        sparsegpt(weight, diagonal, 1e-6), wanda(weight, diagonal), atol=1e-6, rtol=1e-5
    )


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.passes.rewriting import two_four

    weight, x = random(8, 96), correlated(300, 96)
    hessian = x.T @ x / len(x)
    whole = sparsegpt(weight, hessian, 0.01)
    monkeypatch.setattr(two_four, "BLOCK", 8)
    torch.testing.assert_close(sparsegpt(weight, hessian, 0.01), whole, atol=1e-4, rtol=1e-4)


def test_activations_without_meaning() -> None:
    assert is_two_four(sparsegpt(random(4, 8), torch.zeros(8, 8), 0.01))
    with pytest.raises(ValueError, match="not finite"):
        sparsegpt(random(4, 8), torch.full((8, 8), float("nan")), 0.01)

"""Refitting: the closed form beside float64 least squares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.passes.rewriting.refit import refitted

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(200, 6, generator=GENERATOR) @ torch.randn(6, 12, generator=GENERATOR)
X += 0.3 * torch.randn(200, 12, generator=GENERATOR)
WEIGHT = torch.randn(7, 12, generator=GENERATOR)
GRAM = X.T @ X / len(X)


def least_squares(kept: list[int], damping: float, penalized: list[int]) -> tuple[Tensor, float]:
    """The best weight of ``kept`` near that of the layer, by lstsq on stacked rows, and its error with the penalty.

    The penalty is the share ``damping`` of the mean of the diagonal of the kept channels' moments of ``penalized``.
    """
    penalty = (damping * GRAM[penalized][:, penalized].diagonal().mean().double() * len(X)).sqrt()
    wanted = torch.cat([X.double() @ WEIGHT.double().T, penalty * WEIGHT[:, kept].double().T])
    rows = torch.cat([X[:, kept].double(), penalty * torch.eye(len(kept), dtype=torch.float64)])
    found = torch.linalg.lstsq(rows, wanted).solution
    return found.T, float((rows @ found - wanted).square().sum())


@pytest.mark.parametrize("damping", [1e-3, 0.3])
def test_the_weight_is_that_of_least_squares_with_a_penalty(damping: float) -> None:
    kept = [0, 2, 3, 5, 6, 8, 9, 11]
    expected, _ = least_squares(kept, damping, kept)
    found = refitted(WEIGHT, GRAM, torch.tensor(kept), damping)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_large_penalty_or_no_cut_changes_nothing() -> None:
    kept = torch.arange(8)
    torch.testing.assert_close(refitted(WEIGHT, GRAM, kept, 1e9), WEIGHT[:, :8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(refitted(WEIGHT, GRAM, torch.arange(12), 0.1), WEIGHT, atol=1e-5, rtol=1e-5)


def test_activations_without_meaning() -> None:
    zeros = torch.zeros(12, 12)
    assert torch.equal(refitted(WEIGHT, zeros, torch.arange(8), 0.1), WEIGHT[:, :8])
    with pytest.raises(ValueError, match="not finite"):
        refitted(WEIGHT, torch.full((12, 12), float("inf")), torch.arange(8), 0.1)

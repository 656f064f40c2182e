"""Divergence by position, against that of all positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from optkit.evaluation.long.positions import chosen, kl_by_position
from optkit.evaluation.quality import position_ranges


class Table:
    """Random logits of a window's positions."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.randn(2, 300, 11, generator=torch.Generator().manual_seed(seed))

    def rows(self, window: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        return self.logits[window[0]][list(positions)]


WINDOWS = [[i, *[0] * 299] for i in range(2)]


def test_scores_are_means_over_the_chosen_positions() -> None:
    scores = kl_by_position(Table(1), Table(0), WINDOWS)
    assert [(s.first, s.last) for s in scores] == list(position_ranges(300))
    p, q = (Table(seed).logits.log_softmax(-1) for seed in (0, 1))
    kl = (p.exp() * (p - q)).sum(-1)
    assert scores[0].kl.value == pytest.approx(float(kl[:, :16].mean()), rel=1e-4)
    assert scores[-1].kl.value == pytest.approx(float(kl[:, chosen(256, 299)].mean()), rel=1e-4)
    assert scores[0].kl.stderr > 0 and 0 < scores[0].top1_agreement.value < 1


def test_a_source_has_no_divergence_from_itself() -> None:
    assert all(
        s.kl.value == 0 and s.top1_agreement.value == 1 for s in kl_by_position(Table(0), Table(0), WINDOWS)
    )


def test_positions_of_a_long_range_reach_both_ends() -> None:
    found = chosen(4096, 8191)
    assert len(found) == 32 and (found[0], found[-1]) == (4096, 8191)
    assert chosen(0, 15) == list(range(16))


def test_nan_is_an_error() -> None:
    bad = Table(0)
    bad.logits[1, 299] = torch.nan
    with pytest.raises(FloatingPointError):
        kl_by_position(bad, Table(0), WINDOWS)

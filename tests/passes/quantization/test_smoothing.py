"""The search for smoothing scales: what it predicts is what int8 loses, and it never loses more than no smoothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.passes.quantization.smoothing import (
    rounding_error,
    search_smoothing,
    smoothed_error,
    smoothing_scale,
)


def layer(outliers: bool = True) -> tuple[Tensor, Tensor]:
    """Activations [T, K], some of whose channels are large if ``outliers``, and a weight [N, K]."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 64, generator=generator)
    if outliers:
        x[:, [3, 40, 41]] *= 50
    return x, torch.randn(48, 64, generator=generator)


def measured_error(x: Tensor, weight: Tensor, scale: Tensor, group_size: int) -> float:
    """Mean squared error of a token's outputs when both are rounded."""
    smooth, scaled = x / scale, weight * scale
    rounded = smooth + rounding_error(smooth, group_size)
    changed = scaled + rounding_error(scaled, group_size)
    return float((rounded @ changed.T - x @ weight.T).square().sum(dim=1).mean())


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_prediction_is_what_is_lost(alpha: float, group_size: int) -> None:
    x, weight = layer()
    scale = smoothing_scale(x.abs().amax(0), [weight], alpha)
    expected = measured_error(x, weight, scale, group_size)
    assert smoothed_error(x, weight, scale, group_size) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("group_size", [0, 32])
def test_the_search_beats_half_and_nothing(group_size: int) -> None:
    x, weight = layer()
    found = search_smoothing(x, [weight[:16], weight[16:]], group_size)
    half = smoothing_scale(x.abs().amax(0), [weight], 0.5)
    error = measured_error(x, weight, found, group_size)
    assert error < measured_error(x, weight, torch.ones(64), group_size) / 3
    assert error < 1.02 * measured_error(x, weight, half, group_size)


def test_where_there_is_nothing_to_smooth_little_changes() -> None:
    x, weight = layer(outliers=False)
    found = search_smoothing(x, [weight], 32)
    plain = measured_error(x, weight, torch.ones(64), 32)
    assert measured_error(x, weight, found, 32) < 1.1 * plain


def test_zeros_stay_finite() -> None:
    found = search_smoothing(torch.zeros(4, 32), [torch.zeros(3, 32)], 32)
    assert found.isfinite().all() and (found > 0).all()

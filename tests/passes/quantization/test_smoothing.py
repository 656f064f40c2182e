"""The search for smoothing scales: what it predicts is what int8 loses, and it never loses more than no smoothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.passes.quantization import smoothing
from optkit.passes.quantization.smoothing import (
    search_smoothing,
    smoothed_errors,
    smoothing_scale,
    squared_rounding_errors,
)


def layer(outliers: bool = True) -> tuple[Tensor, Tensor]:
    """Activations [T, K], some of whose channels are large if ``outliers``, and a weight [N, K]."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 64, generator=generator)
    if outliers:
        x[:, [3, 40, 41]] *= 50
    return x, torch.randn(48, 64, generator=generator)


def int8(values: Tensor, group_size: int) -> Tensor:
    """Values [M, K] rounded to int8 in float64, with a scale for each run of channels."""
    groups = values.double().unflatten(1, (-1, group_size or values.shape[1]))
    step = groups.abs().amax(dim=2, keepdim=True) / 127
    return (torch.round(groups / step) * step).flatten(1)


def measured_error(x: Tensor, weight: Tensor, scale: Tensor, group_size: int) -> float:
    """Mean squared error of a token's outputs when both are rounded."""
    smooth, scaled = x / scale, weight * scale
    lost = int8(smooth, group_size) @ int8(scaled, group_size).T - x.double() @ weight.double().T
    return float(lost.square().sum(dim=1).mean())


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_prediction_is_what_is_lost(alpha: float, group_size: int) -> None:
    x, weight = layer()
    scale = smoothing_scale(x.abs().amax(0), [weight], alpha)
    expected = measured_error(x, weight, scale, group_size)
    (found,) = smoothed_errors(x, weight, scale[None], group_size)
    assert float(found) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("group_size", [0, 32])
def test_errors_of_rounding_a_few_rows_at_a_time(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothing, "BLOCK_VALUES", 7 * 64)  # 48 rows in 7 blocks
    _, weight = layer()
    scales = torch.stack([torch.ones(64), torch.linspace(0.5, 2.0, 64)])
    expected = [(int8(weight * s, group_size) - weight.double() * s).square().sum(dim=0) for s in scales]
    torch.testing.assert_close(
        squared_rounding_errors(weight, scales, group_size), torch.stack(expected), rtol=1e-3, atol=1e-9
    )


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

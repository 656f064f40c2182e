"""Integer grids: levels, ends, zero points, float16 scales, shorter last groups."""

from __future__ import annotations

import pytest
import torch

from optkit.passes.quantization import grid as quantization_grid
from optkit.passes.quantization.grid import IntegerGrid, fit_groups, round_to_nearest, runs
from optkit.passes.quantization.int4_grid import Int4Grid, quantize_int4


def weight(n: int = 8, k: int = 96) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_no_weight_moves_by_more_than_half_a_step(
    bits: int, symmetric: bool, group_size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the end that a symmetric grid misses by half a step more, and float16 scales; rows some at a time."""
    monkeypatch.setattr(quantization_grid, "NUMBERS_AT_ONCE", 96 * rows)
    grid, w = IntegerGrid(bits, group_size, symmetric), weight()
    found = round_to_nearest(w, grid)
    steps = found.scale.repeat_interleave(group_size or 96, dim=1)
    assert ((found.dequantize(group_size) - w).abs() <= (1.01 if symmetric else 0.51) * steps).all()


def test_symmetric_levels_lie_around_zero_and_asymmetric_ones_reach_both_ends() -> None:
    w = torch.tensor([[-1.0, 0.0, 0.5, 3.0]])
    even = round_to_nearest(w, IntegerGrid(4, 0, True, half=False))
    assert even.scale[0, 0] == pytest.approx(3 / 7.5)
    assert even.dequantize(0)[0, 1] == 0
    skewed = round_to_nearest(w, IntegerGrid(4, 0, False, half=False))
    assert skewed.scale[0, 0] == pytest.approx(4 / 15)
    zero = -skewed.minimum / skewed.scale
    assert zero[0, 0] == pytest.approx(4.0)  # an integer: -(-1) / (4 / 15) = 3.75, rounded
    assert skewed.dequantize(0)[0, 1] == 0


def test_a_whole_row_is_rounded_at_once_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_grid, "NUMBERS_AT_ONCE", 10)
    found, w = round_to_nearest(weight().bfloat16(), IntegerGrid(8, 0)), weight().bfloat16().double()
    scale = (w.abs().amax(1, keepdim=True) / 127).float().half().double()
    assert found.codes.shape == w.shape and found.scale.shape == (8, 1)
    assert ((found.codes.double() - 128) * scale - w).abs().max() <= 0.51 * scale.max()


def test_int8_leaves_the_lowest_code_out() -> None:
    found = round_to_nearest(weight(), IntegerGrid(8, 32))
    assert found.codes.min() >= 1 and found.codes.max() == 255


def test_scales_are_float16_numbers_unless_asked_otherwise() -> None:
    scale, _ = fit_groups(weight(), IntegerGrid(4, 32))
    assert torch.equal(scale.to(torch.float16).to(torch.float32), scale)
    scale, _ = fit_groups(weight(), IntegerGrid(4, 32, half=False))
    assert not torch.equal(scale.to(torch.float16).to(torch.float32), scale)


@pytest.mark.parametrize(
    "grid", [IntegerGrid(4, 32), IntegerGrid(4, 32, False), Int4Grid(32, True), Int4Grid(32, False)]
)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_extreme_groups_stay_finite(grid: IntegerGrid, value: float) -> None:
    found = round_to_nearest(torch.full((2, 64), value), grid)
    assert found.dequantize(32).isfinite().all()
    if value == 0:
        assert (found.dequantize(32) == 0).all()


def test_a_shorter_last_group() -> None:
    assert list(runs(100, 32)) == [slice(0, 96), slice(96, 100)]
    assert list(runs(96, 32)) == [slice(0, 96)]
    assert list(runs(20, 32)) == [slice(0, 20)]
    w = weight(k=100)
    found = round_to_nearest(w, IntegerGrid(4, 32))
    assert found.scale.shape == (8, 4)
    last = round_to_nearest(w[:, 96:], IntegerGrid(4, 0))
    assert torch.equal(found.codes[:, 96:], last.codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_native_int4_grid_is_that_of_its_rounding(symmetric: bool) -> None:
    w = weight()
    expected, found = quantize_int4(w, 32, symmetric), round_to_nearest(w, Int4Grid(32, symmetric))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale.to(torch.float32))

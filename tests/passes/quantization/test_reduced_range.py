"""Codes for 16-bit sums of two products: the rule, checked by sums in int64, and its price."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.passes.quantization import formats
from optkit.passes.quantization.formats import quantize_weight

LOWEST, HIGHEST = -(2**15), 2**15 - 1


def sums_of_two(codes: Tensor) -> tuple[int, int]:
    """The least and the greatest sum of two neighbouring codes times any two bytes."""
    pairs = F.pad(codes.to(torch.int64), (0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
    return int(255 * pairs.clamp(max=0).sum(2).amin()), int(255 * pairs.clamp(min=0).sum(2).amax())


def squared_error(weight: Tensor, codes: Tensor, scale: Tensor) -> float:
    restored = codes.double().unflatten(1, (scale.shape[1], -1)) * scale.double()[..., None]
    return float((restored.flatten(1) - weight.double()).square().sum())


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 40), st.sampled_from([(0, 1), (0, 33), (0, 576), (32, 32), (32, 576), (96, 192)]),
    st.floats(-15, 38), st.floats(0, 4), st.integers(0, 2**31),
)  # fmt: skip
def test_no_sum_leaves_16_bits(
    rows: int, shape: tuple[int, int], exponent: float, tail: float, seed: int
) -> None:
    group, channels = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, channels, generator=generator).double()
    weight = (weight.sign() * weight.abs() ** (1 + tail) * 10.0**exponent).clamp(-3e38, 3e38).float()
    codes, scale = quantize_weight(weight, group, reduce_range=True)
    least, greatest = sums_of_two(codes)
    assert least >= LOWEST and greatest <= HIGHEST
    assert codes.shape == weight.shape and int(codes.abs().max()) <= 127
    assert scale.shape == (rows, channels // (group or channels))
    # no weight moves by more than a step and a half: half by rounding, one where both neighbours were rounded up
    steps = scale.double().repeat_interleave(group or channels, 1)
    assert ((codes * steps - weight.double()).abs() <= 1.51 * steps).all()


def test_equal_neighbours_take_half_the_range() -> None:
    codes, scale = quantize_weight(torch.tensor([[1.0, 1.0, -1.0, -1.0]]), 0, reduce_range=True)
    assert codes.tolist() == [[64, 64, -64, -64]]
    assert scale.float().item() == 1 / 64


def test_neighbours_of_two_signs_keep_eight_bits() -> None:
    weight = torch.tensor([[1.0, -1.0, -1.0, 1.0, 0.5, 0.0]])
    assert torch.equal(quantize_weight(weight, 0, True)[0], quantize_weight(weight, 0)[0])


@pytest.mark.parametrize("group", [32, 192, 0])
def test_the_price_is_less_than_that_of_seven_bits(group: int) -> None:
    weight = torch.randn(512, 576, generator=torch.Generator().manual_seed(0))
    plain = squared_error(weight, *quantize_weight(weight, group))
    assert 1.2 < squared_error(weight, *quantize_weight(weight, group, reduce_range=True)) / plain < 2


def test_many_rows_are_rounded_as_few_are() -> None:
    weight = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))
    whole = quantize_weight(weight, 32, reduce_range=True)
    with mock.patch.object(formats, "BLOCK_VALUES", 7 * 96):
        assert all(map(torch.equal, quantize_weight(weight, 32, reduce_range=True), whole))


def test_zeros_and_empty_weights() -> None:
    codes, scale = quantize_weight(torch.zeros(3, 5), 0, reduce_range=True)
    assert not codes.any() and (scale == 1).all()
    assert quantize_weight(torch.zeros(0, 64), 32, reduce_range=True)[0].shape == (0, 64)

"""The specs of linear layers against float64 products of weights that are dequantized element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.packed_codes import pack_codes

T, N, K, GROUP = 5, 6, 32, 8


def integers(low: int, high: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def floats(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def by_element(codes: Tensor, scale: Tensor, zero: float | Tensor = 0.0) -> Tensor:
    """Float64 [N, K]: ``(code - zero) * scale`` with the scale of each element's group, in loops."""
    out = torch.empty(codes.shape, dtype=torch.float64)
    size = codes.shape[1] // scale.shape[1]
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            point = float(zero[n, k // size]) if isinstance(zero, Tensor) else zero
            out[n, k] = (float(codes[n, k]) - point) * float(scale[n, k // size])
    return out


@pytest.mark.parametrize("groups", [1, K // GROUP])
def test_linear_w8a8_is_the_product_of_dequantized_tensors(groups: int) -> None:
    q, weight = integers(0, 256, (T, K), 0).to(torch.uint8), integers(-128, 128, (N, K), 1).to(torch.int8)
    scale, weight_scale, bias = floats((T, groups), 2), floats((N, groups), 3), floats((N,), 4)
    expected = by_element(q, scale, 128.0) @ by_element(weight, weight_scale).T + bias
    found = reference.linear_w8a8(q, scale, weight, weight_scale, bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_linear_w4a8_is_the_product_of_dequantized_tensors(symmetric: bool) -> None:
    groups = K // GROUP
    q, codes = integers(0, 256, (T, K), 0).to(torch.uint8), integers(0, 16, (N, K), 1).to(torch.uint8)
    scale, weight_scale = floats((T, 1), 2), floats((N, groups), 3)
    minimum = None if symmetric else -floats((N, groups), 4)
    weight = by_element(codes, weight_scale, 8.0 if symmetric else 0.0)
    if minimum is not None:
        weight += minimum.double().repeat_interleave(GROUP, dim=1)
    found = reference.linear_w4a8(q, scale, reference.pack_int4(codes), weight_scale, minimum)
    torch.testing.assert_close(found.double(), by_element(q, scale, 128.0) @ weight.T, rtol=1e-5, atol=1e-2)


def test_linear_w8a16_is_the_product_with_the_dequantized_weight() -> None:
    x, weight = floats((T, K), 0), integers(-128, 128, (N, K), 1).to(torch.int8)
    weight_scale, bias = floats((N, K // GROUP), 2), floats((N,), 3)
    expected = x.double() @ by_element(weight, weight_scale).T + bias
    found = reference.linear_w8a16(x, weight, weight_scale, bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_linear_wna16_is_the_product_with_the_dequantized_weight(bits: int) -> None:
    x, codes = floats((T, K), 0), integers(0, 1 << bits, (N, K), 1).to(torch.uint8)
    weight_scale = floats((N, K // GROUP), 2)
    zero = integers(0, 1 << bits, (N, K // GROUP), 3).to(torch.uint8)
    packed = pack_codes(codes, bits)
    for point, value in ((zero, zero), (None, float(1 << (bits - 1)))):
        found = reference.linear_wna16(x, packed, weight_scale, point, None, bits=bits, group_size=GROUP)
        expected = x.double() @ by_element(codes, weight_scale, value).T
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)


def test_linear_wna16_takes_the_group_of_a_channel_from_g_idx() -> None:
    x, codes, weight_scale = floats((T, K), 0), integers(0, 16, (N, K), 1).to(torch.uint8), floats((N, 4), 2)
    g_idx = integers(0, 4, (K,), 3).to(torch.int32)
    weight = (codes.double() - 8) * weight_scale.double()[:, g_idx.long()]
    found = reference.linear_wna16(x, pack_codes(codes, 4), weight_scale, None, g_idx, bits=4)
    torch.testing.assert_close(found.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-3)

"""The spec of float8 E4M3 against a table of its 253 finite values, made from the bits, and float64 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference_fp8 as spec

T, N, K = 4, 6, 16


def value_of(byte: int) -> float | None:
    """The value of an E4M3 byte by the definition (arXiv 2209.05433, table 1); None for NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = torch.tensor(sorted({v for b in range(256) if (v := value_of(b)) is not None}), dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nearest(x: Tensor) -> Tensor:
    """The distance of each element of ``x`` from the nearest E4M3 value, float64."""
    return (x.double()[..., None] - VALUES).abs().amin(-1)


def test_the_largest_value_is_that_of_the_table() -> None:
    assert VALUES.max() == spec.FP8_MOST and len(VALUES) == 253


def test_quantize_fp8_per_token_takes_the_nearest_value_and_scales_the_largest_to_448() -> None:
    x = random(T, 64)
    q, scale = spec.quantize_fp8_per_token(x)
    torch.testing.assert_close(q.double().abs().amax(-1), torch.full((T,), 448.0, dtype=torch.float64))
    quotient = x / scale
    torch.testing.assert_close((quotient.double() - q.double()).abs(), nearest(quotient), rtol=0, atol=1e-9)


def test_quantize_fp8_per_token_of_zeros_is_zeros() -> None:
    q, scale = spec.quantize_fp8_per_token(torch.zeros(2, 8))
    assert not q.float().any() and bool((scale > 0).all())


def test_round_fp8_saturates_with_a_given_scale() -> None:
    rounded = spec.round_fp8(torch.tensor([[1.0, 1000.0, -1000.0]]), torch.tensor([1.0]))
    assert rounded.tolist() == [[1.0, 448.0, -448.0]]


@pytest.mark.parametrize("activations", ["token", "tensor", "none"])
def test_linear_fp8_is_the_float64_product_of_rounded_tensors(activations: str) -> None:
    x, weight = random(T, K), random(N, K, seed=1).to(torch.float8_e4m3fn)
    weight_scale, bias = random(N, 2, seed=2).abs(), random(N, seed=3)
    input_scale = torch.tensor([0.01]) if activations == "tensor" else None
    rounded = x if activations == "none" else spec.round_fp8(x, input_scale)
    wide = weight.double() * weight_scale.double().repeat_interleave(K // 2, dim=1)
    found = spec.linear_fp8(x, weight, weight_scale, input_scale, bias, activations=activations)
    torch.testing.assert_close(found.double(), rounded.double() @ wide.T + bias, rtol=1e-5, atol=1e-5)


def test_linear_fp8_rowwise_is_the_float64_product() -> None:
    q, scale = spec.quantize_fp8_per_token(random(T, K))
    weight, weight_scale = spec.quantize_fp8_per_token(random(N, K, seed=1))
    expected = (q.double() * scale) @ (weight.double() * weight_scale).T
    found = spec.linear_fp8_rowwise(q, scale, weight, weight_scale)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(N, K)}, "must be float8_e4m3fn"),
        ({"weight_scale": torch.ones(N, 3)}, "divisor of 16"),
        ({"activations": "tensor"}, "don't agree"),
        ({"bias": torch.zeros(1)}, "the bias must be"),
    ],
)
def test_linear_fp8_refuses_what_broadcasting_would_accept(change: dict[str, object], message: str) -> None:
    weight = torch.zeros(N, K).to(torch.float8_e4m3fn)
    given = {"weight": weight, "weight_scale": torch.ones(N, 1), "input_scale": None, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        spec.linear_fp8(torch.zeros(T, K), **given)

"""The specs of norms and gates against float64 formulas, and of quantization against a search over all codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference_pointwise as spec

EPS = 1e-5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_formula_in_float64(offset: float) -> None:
    x, weight = random(4, 10), random(10, seed=1)
    expected = torch.empty(4, 10)
    for i, row in enumerate(x.tolist()):
        root = math.sqrt(sum(v * v for v in row) / 10 + EPS)
        expected[i] = torch.tensor(
            [v / root * (w + offset) for v, w in zip(row, weight.tolist(), strict=True)]
        )
    torch.testing.assert_close(spec.rms_norm(x, weight, EPS, offset), expected)


def test_add_rms_norm_is_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = random(4, 10), random(4, 10, seed=1), random(10, seed=2)
    normed, total = spec.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(total, x + residual)
    norm = torch.nn.RMSNorm(10, EPS, dtype=torch.float64)
    norm.weight.data = weight.double()
    torch.testing.assert_close(normed.double(), norm((x + residual).double()), rtol=1e-5, atol=1e-5)


def test_layer_norm_is_the_formula_in_float64() -> None:
    x, weight, bias = random(4, 10), random(10, seed=1), random(10, seed=2)
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    expected = centered / (centered.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight + bias
    torch.testing.assert_close(spec.layer_norm(x, weight, bias, EPS).double(), expected, rtol=1e-5, atol=1e-5)


def test_softplus_is_the_logarithm_of_a_sum_in_float64() -> None:
    x, bias = random(4, 10), random(10, seed=1)
    shifted = (x.double() + bias.double()).tolist()
    expected = torch.tensor([[math.log1p(math.exp(v)) for v in row] for row in shifted])
    torch.testing.assert_close(spec.softplus(x, bias), expected)
    assert torch.equal(spec.softplus(x, None), spec.softplus(x, torch.zeros(10)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gates_are_the_formulas_in_float64(approximate: str) -> None:
    gate, up = random(3, 6), random(3, 6, seed=1)

    def gelu(v: float) -> float:
        if approximate == "tanh":
            return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        return 0.5 * v * (1 + math.erf(v / math.sqrt(2)))

    wide = gate.double()
    expected = wide.clone().apply_(gelu) * up
    packed = torch.cat((gate, up), dim=-1)
    for found in (spec.gelu_mul(gate, up, approximate), spec.gelu_mul_packed(packed, approximate)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    expected = wide / (1 + (-wide).exp()) * up
    for found in (spec.silu_mul(gate, up), spec.silu_mul_packed(packed)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [0, 4])
def test_quantize_per_token_takes_the_nearest_code(group: int) -> None:
    x = random(3, 8)
    x[1] = 0.0
    q, scale = spec.quantize_per_token(x, group)
    assert q.dtype == torch.uint8 and scale.shape == (3, 8 // (group or 8))
    wide = scale.double().repeat_interleave(group or 8, dim=1)
    codes = torch.arange(-127, 128, dtype=torch.float64)
    nearest = (x.double()[..., None] - wide[..., None] * codes).abs().amin(-1)
    error = (x.double() - (q.double() - 128) * wide).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-6)
    groups = x.abs().unflatten(1, (-1, group or 8)).amax(-1)
    torch.testing.assert_close(scale, groups / 127)


@pytest.mark.parametrize("fmt", spec.FORMATS)
def test_fused_ops_are_the_two_ops_in_a_row(fmt: str) -> None:
    x, residual, weight = random(4, 10), random(4, 10, seed=1), random(10, seed=2)
    pairs = [
        (spec.rms_norm_quantize(x, weight, EPS, fmt=fmt), spec.rms_norm(x, weight, EPS)),
        (spec.add_rms_norm_quantize(x, residual, weight, EPS, fmt=fmt), spec.rms_norm(x + residual, weight, EPS)),
        (spec.silu_mul_quantize(x, fmt), spec.silu_mul_packed(x)),
        (spec.gelu_mul_quantize(x, fmt), spec.gelu_mul_packed(x)),
    ]  # fmt: skip
    for (q, scale, *_), value in pairs:
        zero = 128 if fmt == "int8" else 0
        step = scale * (0.5 if fmt == "int8" else 448 / 28)  # half the distance of the largest two values
        assert bool((((q.float() - zero) * scale - value).abs() <= step * 1.001).all())


def test_quantize_as_refuses_another_format() -> None:
    with pytest.raises(ValueError, match="int8 or fp8, not 'int4'"):
        spec.quantize_as(random(1, 4), "int4")

"""int8 layers of bfloat16 precision, and gated MLPs of such layers in one call: AMX, and the fallback of other CPUs.

The other side is float64 arithmetic on operands rounded to bfloat16 by torch.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels.cpu import gates, int8, native
from optkit.kernels.cpu.int8 import is_half
from tests.kernels.test_int8 import layers, poisoned, weights_of
from tests.support.isas import usable_isas

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

AMX = "amx"
ACTIVATIONS = {
    gates.SILU: F.silu,
    gates.GELU: F.gelu,
    gates.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


def run(x: Tensor, packed: dict[int, Tensor], bias: Tensor | None = None) -> Tensor:
    with mock.patch.object(torch, "empty", poisoned):
        return int8.linear_w8a16(x, packed[1], packed[2], bias, precision="bfloat16")


Biases = tuple[Tensor | None, Tensor | None]


def mlp(
    x: Tensor,
    gate_up: dict[int, Tensor],
    down: dict[int, Tensor],
    activation: int,
    width: int,
    biases: Biases = (None, None),
) -> Tensor:
    """The native call for x [T, K] with dense rows."""
    out = torch.full((len(x), len(down[1])), torch.nan)
    first, second = (
        (
            p[1].data_ptr(),
            p[2].data_ptr(),
            0 if bias is None else bias.data_ptr(),
            p[2].shape[1],
            is_half(p[2]),
        )
        for p, bias in zip((gate_up, down), biases, strict=True)
    )
    native.library().optkit_gated_mlp_w8a16(
        x.data_ptr(), x.stride(0), *first, *second, out.data_ptr(), len(x), out.shape[1], width, x.shape[1], activation,
        native.threads(),
    )  # fmt: skip
    return out


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float64)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


def close_to_rounded_operands(layer: tuple[int, int, int, int, int], biased: bool, threads: int) -> None:
    m, k, n, group, seed = layer
    torch.manual_seed(seed)
    weight, scale = weights_of(n, k, group, half=seed % 2 == 1)
    x, bias = torch.randn(m, k) * torch.rand(k) * 10, torch.randn(n) if biased else None
    torch.set_num_threads(threads)
    found = run(x, int8.pack({1: weight, 2: scale}), bias)
    left, right = rounded(x), rounded(dequantized(weight, scale))
    expected = left @ right.T + (bias.double() if bias is not None else 0.0)
    # Sums of at most k products and the bias in float32; a denormal operand counts as zero.
    bound = (
        (k + 2) * 2.0**-24 * (left.abs() @ right.abs().T + (bias.abs().double() if bias is not None else 0.0))
    )
    assert bool(((found - expected).abs() <= bound + 1e-30).all())


def rows_have_the_same_bits(k: int, n: int, rows: int) -> None:
    torch.manual_seed(k + rows)
    packed = int8.pack(dict(zip((1, 2), weights_of(n, k, 32), strict=True)))
    x, bias = torch.randn(rows, k), torch.randn(n)
    together = run(x, packed, bias)
    for row in {0, 15, 16, 31, 32, rows // 2, rows - 1} & set(range(rows)):
        assert torch.equal(run(x[row : row + 1], packed, bias)[0], together[row]), row


def mlp_has_the_bits_of_three_ops(isa: str, activation: int, k: int, width: int, n: int, rows: int) -> None:
    torch.manual_seed(width + rows)
    gate_up = int8.pack(dict(zip((1, 2), weights_of(2 * width, k, 32), strict=True)))
    down = int8.pack(dict(zip((1, 2), weights_of(n, width, 32, half=True), strict=True)))
    x = torch.randn(rows, k) * 0.05
    native.set_isa(isa)
    both: list[Biases] = [(None, None), (torch.randn(2 * width), torch.randn(n))]
    for biases in both:
        hidden = gates.gated_packed(run(x, gate_up, biases[0]), activation)
        # Without AMX the layers keep more than bfloat16, and so does the product of gates and ups.
        assert torch.equal(mlp(x, gate_up, down, activation, width, biases), run(hidden, down, biases[1]))


needs_amx = pytest.mark.skipif(AMX not in usable_isas(), reason="the CPU has no AMX")


@needs_amx
@settings(deadline=None, max_examples=100)
@given(layers(), st.booleans(), st.integers(1, 4))
def test_close_to_float64_on_rounded_operands(
    layer: tuple[int, int, int, int, int], biased: bool, threads: int
) -> None:
    native.set_isa(AMX)
    close_to_rounded_operands(layer, biased, threads)


@needs_amx
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 300, 530])
@pytest.mark.parametrize(("k", "n"), [(576, 96), (1536, 83), (2048, 33), (36, 31), (100, 64)])
def test_large_problems_are_close_to_float64(k: int, n: int, rows: int) -> None:
    """Several blocks of rows and of input channels, and tiles that are not full."""
    native.set_isa(AMX)
    close_to_rounded_operands((rows, k, n, 4, rows), True, 2)


@needs_amx
@pytest.mark.parametrize("rows", [17, 40, 530])
@pytest.mark.parametrize(("k", "n"), [(576, 96), (1536, 83)])
def test_a_row_has_the_same_bits_in_any_batch(k: int, n: int, rows: int) -> None:
    native.set_isa(AMX)
    rows_have_the_same_bits(k, n, rows)


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("k", "width", "n"), [(64, 32, 40), (576, 160, 96), (640, 1536, 64)])
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_a_gated_mlp_has_the_bits_of_its_three_ops(
    isa: str, activation: int, k: int, width: int, n: int, rows: int
) -> None:
    mlp_has_the_bits_of_three_ops(isa, activation, k, width, n, rows)


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_mlp_is_close_to_float64(isa: str, activation: int) -> None:
    torch.manual_seed(activation)
    first, second = weights_of(192, 64, 32), weights_of(40, 96, 32)
    x = torch.randn(50, 64) * 0.05
    native.set_isa(isa)
    found = mlp(
        x, *(int8.pack(dict(zip((1, 2), layer, strict=True))) for layer in (first, second)), activation, 96
    )
    gate, up = (x.double() @ dequantized(*first).double().T).chunk(2, dim=1)
    expected = ACTIVATIONS[activation](gate) * up @ dequantized(*second).double().T
    assert (found - expected).norm() <= 0.006 * expected.norm()  # bfloat16 keeps 8 bits


@needs_amx
def test_a_row_that_is_not_a_number_spoils_only_itself() -> None:
    native.set_isa(AMX)
    packed = int8.pack(dict(zip((1, 2), weights_of(40, 64, 32), strict=True)))
    x = torch.randn(5, 64)
    clean = run(x, packed)
    x[2, 7], x[3, 40] = float("nan"), float("inf")
    out = run(x, packed)
    assert not out[2:4].isfinite().any()
    assert torch.equal(out[[0, 1, 4]], clean[[0, 1, 4]])

"""Packed codes against the library that defines the layout, and the reference layer against float arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference, reference_linear
from optkit.kernels.packed_codes import BITS, pack_codes, unpack_codes, words_of

CASES = [(bits, columns) for bits in BITS for columns in (1, 7, 32, 36, 100)]


def random_codes(n: int, k: int, bits: int) -> Tensor:
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    codes[0] = (1 << bits) - 1  # the sign bit of every word
    return codes


@pytest.mark.parametrize(("bits", "columns"), CASES)
def test_codes_round_trip(bits: int, columns: int) -> None:
    codes = random_codes(5, columns, bits)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, words_of(columns, bits)) and packed.dtype == torch.int32
    assert torch.equal(unpack_codes(packed, bits, columns), codes)


@pytest.mark.parametrize(("bits", "columns"), CASES)
def test_the_words_are_those_of_compressed_tensors(bits: int, columns: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(5, columns, bits)
    signed = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(pack_codes(codes, bits), helpers.pack_to_int32(signed, bits))


def naive(
    codes: Tensor, scale: Tensor, zero: Tensor | None, g_idx: Tensor | None, bits: int, size: int
) -> Tensor:
    """The weight by the formula, one number at a time."""
    n, k = codes.shape
    out = torch.empty(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            group = int(g_idx[j]) if g_idx is not None else j // size
            middle = 1 << (bits - 1) if zero is None else int(zero[i, group])
            out[i, j] = (int(codes[i, j]) - middle) * float(scale[i, group])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("k", "size"), [(40, 8), (40, 40), (40, 16)])
@pytest.mark.parametrize("bits", BITS)
def test_the_reference_multiplies_by_the_dequantized_weight(
    bits: int, k: int, size: int, act_order: bool, asymmetric: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(bits + k + size)
    codes, groups = random_codes(6, k, bits), -(-k // size)
    scale = (torch.rand(6, groups) * 0.1).to(dtype)
    zero = torch.randint(0, 1 << bits, (6, groups), dtype=torch.uint8) if asymmetric else None
    g_idx = (torch.arange(k) // size)[torch.randperm(k)].to(torch.int32) if act_order else None
    x, bias = torch.randn(3, k), torch.randn(6)
    out = reference.linear_wna16(
        x, pack_codes(codes, bits), scale, zero, g_idx, bias, bits=bits, group_size=size
    )
    weight = naive(codes, scale, zero, g_idx, bits, size)
    torch.testing.assert_close(out.double(), x.double() @ weight.T + bias.double(), atol=1e-3, rtol=1e-5)


def test_a_large_layer_is_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = random_codes(10, 64, 4), torch.rand(10, 2)
    arguments = (torch.randn(3, 64), pack_codes(codes, 4), scale, None, None, torch.randn(10))
    whole = reference.linear_wna16(*arguments, group_size=32)
    monkeypatch.setattr(reference_linear, "DEQUANTIZED_AT_ONCE", 3 * 64)
    torch.testing.assert_close(reference.linear_wna16(*arguments, group_size=32), whole)


@pytest.mark.parametrize(
    ("position", "value", "options"),
    [
        (1, torch.zeros(4, 7, dtype=torch.int32), {}),
        (1, torch.zeros(4, 8, dtype=torch.int64), {}),
        (1, torch.zeros(4, 8, dtype=torch.int32), {"bits": 5}),
        (2, torch.ones(4, 3), {}),
        (2, torch.ones(3, 2), {}),
        (2, torch.ones(4, 2), {"group_size": 16}),
        (2, torch.ones(4, 2, dtype=torch.int32), {}),
        (3, torch.ones(4, 1, dtype=torch.uint8), {}),
        (3, torch.ones(4, 2, dtype=torch.int8), {}),
        (4, torch.zeros(63, dtype=torch.int32), {}),
        (4, torch.zeros(64), {}),
        (5, torch.zeros(3), {}),
    ],
)
def test_tensors_that_do_not_fit_are_refused(position: int, value: Tensor, options: dict[str, int]) -> None:
    arguments: list[Tensor | None] = [
        torch.zeros(2, 64), torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 2), None, None, None
    ]  # fmt: skip
    reference.linear_wna16(*arguments, group_size=32)
    arguments[position] = value
    with pytest.raises(ValueError):
        reference.linear_wna16(*arguments, **({"group_size": 32} | options))

"""A quantized layer's float weight is that of its format's definition, number by number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import (
    G_IDX,
    INPUT_SCALE,
    MINIMUM,
    PACKED,
    SCALE,
    SHARED,
    ZERO_POINT,
    LazyOperands,
    QuantizedLinear,
    operand_names,
)
from optkit.kernels import reference
from tests.support.packers import words

N, K = 4, 64
GENERATOR = torch.Generator().manual_seed(0)


def packed(codes: Tensor, bits: int) -> Tensor:
    return torch.tensor([words([(int(code), bits) for code in row]) for row in codes], dtype=torch.int32)


def numbers(bits: int, groups: int) -> tuple[Tensor, Tensor]:
    """Random codes [N, K] and scales [N, groups]."""
    codes = torch.randint(0, 1 << bits, (N, K), generator=GENERATOR)
    return codes, torch.rand(N, groups, generator=GENERATOR) + 0.1


def wide(value: Tensor, group_size: int) -> Tensor:
    """``value`` [N, G] for each channel [N, K]."""
    return torch.stack([value[:, k // group_size] for k in range(K)], dim=1).double()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("op", [reference.linear_w8a8, reference.linear_w8a16])
def test_float_weight_of_int8_is_code_times_scale(op: object, groups: int) -> None:
    codes, scale = numbers(7, groups)
    layer = QuantizedLinear("a", (N, K), op, {"weight": (codes - 64).to(torch.int8), SCALE: scale})  # type: ignore[arg-type]
    exact = (codes - 64) * wide(scale, K // groups)
    torch.testing.assert_close(layer.float_weight().double(), exact, rtol=1e-6, atol=0)
    assert (layer.bits, layer.columns, layer.group_size) == (8, K, 0 if groups == 1 else K // groups)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_float_weight_of_int4_is_code_times_scale_plus_minimum(asymmetric: bool) -> None:
    codes, scale = numbers(4, 2)
    operands = {PACKED: packed(codes, 4), SCALE: scale}
    minimum = torch.randn(N, 2, generator=GENERATOR)
    layer = QuantizedLinear(
        "a", (N, K), reference.linear_w4a8, operands | ({MINIMUM: minimum} if asymmetric else {})
    )
    low = wide(minimum, 32) if asymmetric else -8 * wide(scale, 32)
    exact = codes * wide(scale, 32) + low
    torch.testing.assert_close(layer.float_weight().double(), exact, rtol=1e-5, atol=1e-5)
    assert (layer.bits, layer.group_size) == (4, 32)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_float_weight_of_packed_codes_is_code_less_zero_times_the_scale_of_the_group(
    bits: int, in_order: bool, asymmetric: bool
) -> None:
    codes, scale = numbers(bits, 2)
    group = torch.arange(K) // 48 if in_order else torch.randperm(K, generator=GENERATOR) % 2
    zero = torch.randint(0, 1 << bits, (N, 2), generator=GENERATOR)
    operands = {PACKED: packed(codes, bits), SCALE: scale}
    operands |= {ZERO_POINT: zero.to(torch.uint8)} if asymmetric else {}
    operands |= {} if in_order else {G_IDX: group.to(torch.int32)}
    layer = QuantizedLinear("a", (N, K), reference.linear_wna16, operands, {"bits": bits, "group_size": 48})
    middle = zero[:, group] if asymmetric else 1 << bits - 1
    exact = (codes - middle) * scale[:, group].double()
    torch.testing.assert_close(layer.float_weight().double(), exact, rtol=1e-6, atol=1e-6)
    assert (layer.bits, layer.group_size) == (bits, 48)


def test_float_weight_of_float8_is_value_times_scale() -> None:
    weight, scale = torch.randn(N, K, generator=GENERATOR).to(torch.float8_e4m3fn), numbers(2, 1)[1]
    layer = QuantizedLinear("a", (N, K), reference.linear_fp8, {"weight": weight, SCALE: scale})
    torch.testing.assert_close(layer.float_weight(), weight.float() * scale)


def test_operands_are_in_the_order_of_the_arguments_and_shared_where_they_are_of_the_input() -> None:
    assert operand_names(reference.linear_w8a8) == ("weight", SCALE)
    assert operand_names(reference.linear_w4a8) == (PACKED, SCALE, MINIMUM)
    assert operand_names(reference.linear_wna16) == (PACKED, SCALE, ZERO_POINT, G_IDX)
    assert operand_names(reference.linear_fp8) == ("weight", SCALE, INPUT_SCALE)
    assert {G_IDX, INPUT_SCALE} == SHARED


def test_lazy_operands_are_read_at_each_access_and_only_known_ones() -> None:
    read: list[str] = []

    def reading(name: str) -> torch.Tensor:
        read.append(name)
        return torch.zeros(2, 2)

    layer = QuantizedLinear("a", (2, 16), reference.linear_w4a8, LazyOperands((PACKED, SCALE), reading))
    assert layer.names() == ["a.weight_packed", "a.weight_scale"] and read == []
    assert PACKED in layer.operands and "weight_minimum" not in layer.operands
    assert layer.operands.get("weight_minimum") is None and read == []
    assert list(layer.tensors()) == layer.names() and read == [PACKED, SCALE]

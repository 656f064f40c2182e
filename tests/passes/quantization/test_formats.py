"""Formats of quantized layers: the stored codes, unpacked here bit by bit, are the nearest levels to the weight."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from optkit.checkpoint.quantized_linear import G_IDX, MINIMUM, PACKED, SCALE, ZERO_POINT
from optkit.kernels import reference
from optkit.machine.target import DATASHEETS
from optkit.passes.quantization.formats import (
    Int4Format,
    Int8Format,
    PackedFormat,
    WeightFormat,
    quantize_weight,
)
from optkit.passes.quantization.grid import QuantizedWeight
from tests.support.target import TARGET

OTHER = dataclasses.replace(DATASHEETS["cuda-h100"], kind="other")  # type: ignore[arg-type]
FORMATS: list[WeightFormat] = [
    Int8Format(),
    Int8Format(32),
    Int8Format(32, weight_only=True),
    Int4Format(32, symmetric=True),
    Int4Format(32, symmetric=False),
    PackedFormat(2, 32, symmetric=False),
    PackedFormat(3, 32),
    PackedFormat(4, 48, symmetric=False),
    PackedFormat(4, 64),  # a short last group
    PackedFormat(8, 0),
]
N, K = 6, 96


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


def unpacked(packed: Tensor, bits: int) -> np.ndarray:
    """The codes [N, K] of a string of bits, the first code in the lowest bits."""
    rows = []
    for words in packed.numpy().view(np.uint32):
        string = sum(int(word) << 32 * i for i, word in enumerate(words))
        rows.append([string >> bits * k & ((1 << bits) - 1) for k in range(K)])
    return np.array(rows)


def values(fmt: WeightFormat, operands: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The weight [N, K] and the step [N, K] of its levels in float64, by the formats' definitions."""
    size = fmt.grid.group_size or K
    group = np.arange(K) // size
    step = operands[SCALE].double().numpy()[:, group]
    if isinstance(fmt, Int8Format):
        return operands["weight"].numpy() * step, step
    bits = getattr(fmt, "bits", 4)
    codes = unpacked(operands[PACKED], bits)
    if MINIMUM in operands:
        return codes * step + operands[MINIMUM].double().numpy()[:, group], step
    zero = operands[ZERO_POINT].numpy()[:, group] if ZERO_POINT in operands else 1 << bits - 1
    return (codes.astype(float) - zero) * step, step


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rounded_weight_is_within_a_step_and_its_layer_has_the_values_of_the_codes(fmt: WeightFormat) -> None:
    operands = fmt.round(weight())
    exact, step = values(fmt, operands)
    error = np.abs(exact - weight().numpy())
    assert (error <= step * 1.01).all() and np.median(error / step) < 0.35
    layer = fmt.layer("a", (N, K), operands)
    assert list(layer.operands) == [name for name in fmt.operands if name in operands]
    np.testing.assert_allclose(layer.float_weight().numpy(), exact, rtol=1e-5, atol=1e-6)
    assert (layer.activation_group is None) is not fmt.quantizes_input


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_predicted_tensors_and_bytes_are_those_of_a_real_layer(fmt: WeightFormat) -> None:
    real, meta = fmt.round(weight()), fmt.meta_tensors(N, K)
    assert meta.keys() == real.keys()
    assert {name: value.shape for name, value in meta.items()} == {n: v.shape for n, v in real.items()}
    if not isinstance(fmt, Int4Format):  # its scales are float32 where float16 loses too much
        assert fmt.num_bytes(N, K) == sum(value.nbytes for value in real.values())


@pytest.mark.parametrize("group_size", [0, 8])
def test_int8_weights_round_to_the_nearest_step(group_size: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 24)
    weight[2] = 0
    q, scale = quantize_weight(weight, group_size)
    assert q.dtype == torch.int8 and q.shape == weight.shape
    assert scale.shape == (6, 24 // (group_size or 24))
    steps = scale.repeat_interleave(group_size or 24, 1)
    assert ((q * steps - weight).abs() <= steps / 2 + 1e-6).all()
    assert torch.equal(q[2], torch.zeros(24, dtype=torch.int8))
    assert q.unflatten(1, (scale.shape[1], -1)).abs().amax(2)[[0, 1, 3, 4, 5]].eq(127).all()


def test_pack_keeps_the_group_of_each_channel_where_groups_are_no_runs() -> None:
    codes = torch.arange(2 * 8, dtype=torch.uint8).reshape(2, 8)
    scale = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    g_idx = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.int32)
    operands = PackedFormat(4, 4, symmetric=False).pack(QuantizedWeight(codes, scale, -3 * scale, g_idx))
    assert operands[G_IDX] is g_idx and operands[SCALE].dtype == torch.float16
    assert operands[ZERO_POINT].tolist() == [[3, 3], [3, 3]]
    assert operands[PACKED].tolist() == [[0x76543210], [0xFEDCBA98 - (1 << 32)]]


@pytest.mark.parametrize(
    ("fmt", "target", "reason"),
    [
        (Int8Format(64), TARGET, "its 96 input channels are not a multiple of the group size 64"),
        (Int8Format(), OTHER, "no int8 kernel on cuda-h100"),
        (Int8Format(32), OTHER, "no int8 kernel with groups of 32 on cuda-h100"),
        (Int4Format(64), TARGET, "its 96 input channels are not a multiple of the group size 64"),
        (Int4Format(32, True, 64), TARGET, "its 96 input channels are not a multiple of the group size 64"),
        (Int4Format(32), OTHER, "no int4 kernel on cuda-h100"),
    ],
)
def test_layer_that_cannot_run_has_the_reason(fmt: WeightFormat, target: object, reason: str) -> None:
    assert str(fmt.lacks(N, K, target)).startswith(reason)  # type: ignore[arg-type]


def test_packed_layers_run_anywhere_with_their_bits_and_groups_as_options() -> None:
    fmt = PackedFormat(3, 64)
    assert fmt.lacks(N, K, OTHER) is None
    assert fmt.options({}) == {"bits": 3, "group_size": 64}
    assert (fmt.op, fmt.first_operand) == (reference.linear_wna16, 1)
    assert (Int8Format().first_operand, Int8Format(weight_only=True).first_operand) == (2, 1)

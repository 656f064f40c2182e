"""Records of linear layers and of the quantization of their activations: float, int8, int4 and packed codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.graph.ops.operands import (
    BIAS,
    MAX_INT,
    RESULT,
    ROWS_X,
    Choice,
    Kind,
    Role,
    either,
    expect,
    optional,
    value,
    weight,
    whole,
)
from optkit.graph.ops.record import CUDA, PROGRAM, Op, Sharding, Work
from optkit.kernels import reference
from optkit.kernels.packed_codes import BITS

CODES, SCALE = value("q", Kind.UINT8, "T K"), value("scale", Kind.FLOAT32, "T G", Role.ACTIVATION_SCALE)
INT8_WEIGHT = weight("weight", Kind.INT8, "N K")
PACKED_WEIGHT = weight("weight", Kind.INT32, "N W", stored="weight_packed")
GROUP_SCALE = weight("weight_scale", Kind.FLOAT, "N G", Role.WEIGHT_SCALE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    fits = x.ndim >= 1 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    if fits and (bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype)):
        return x.new_empty((*x.shape[:-1], len(weight)))
    return reference.linear(x, weight, bias)  # torch says what does not fit, and imports sympy for it


def head_linear(
    x: Tensor, weight: Tensor, *, num_heads: int, first: int, last: int, transposed: int = 0
) -> Tensor:
    rows, k = weight.shape
    expect(rows % num_heads == 0, f"{rows} rows are not those of {num_heads} heads")
    expect(first < last <= rows // num_heads, f"a head has no rows {first} to {last} of {rows // num_heads}")
    channels, results = (last - first, k) if transposed else (k, last - first)
    expect(tuple(x.shape[1:]) == (num_heads, channels), f"activations must be [T, {num_heads}, {channels}]")
    return x.new_empty(x.shape[0], num_heads, results)


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    expect(x.ndim in (2, 3), "what is quantized must be [T, K] or [T, J, K]")
    size = group_size or x.shape[-1]
    expect(size > 0 and x.shape[-1] % size == 0, f"{x.shape[-1]} channels are no groups of {size}")
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return q, torch.empty((*x.shape[:-1], x.shape[-1] // size), dtype=torch.float32, device=x.device)


def linear_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    expect(q.dtype == torch.uint8, "activations must be uint8")
    expect(
        q.ndim == 2 and tuple(scale.shape) == (q.shape[0], weight_scale.shape[1]),
        "an activation scale a group",
    )
    return int8_product(q, weight, weight_scale, bias).to(getattr(torch, dtype))


def linear_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, precision: str = "float32"
) -> Tensor:
    expect(x.ndim == 2 and x.is_floating_point(), "activations must be float [T, K]")
    return int8_product(x, weight, weight_scale, bias)


def int8_product(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    n, k = weight.shape
    expect(weight.dtype == torch.int8 and x.shape[1] == k, f"int8 weights must be [N, {x.shape[1]}]")
    expect(weight_scale.ndim == 2 and weight_scale.shape[0] == n, f"weight scales must be [{n}, G]")
    expect(
        weight_scale.shape[1] > 0 and k % weight_scale.shape[1] == 0,
        f"{k} channels, {weight_scale.shape[1]} groups",
    )
    expect(bias is None or tuple(bias.shape) == (n,), f"the bias must be [{n}]")
    return torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)


def linear_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    expect(q.ndim == 2 and q.dtype == torch.uint8, "activations must be uint8 [T, K]")
    reference.check_int4(q, scale, weight, weight_scale, weight_minimum, bias)
    return torch.empty((q.shape[0], weight.shape[0]), dtype=torch.float32, device=q.device)


def dequantize_int8(weights: Sequence[Tensor | None], options: Mapping[str, Any], columns: int) -> Tensor:
    weight, scale = present(weights)
    return (weight.unflatten(1, (scale.shape[1], -1)) * scale.to(torch.float32)[..., None]).flatten(1)


def dequantize_int4(weights: Sequence[Tensor | None], options: Mapping[str, Any], columns: int) -> Tensor:
    return reference.dequantize_int4(*present(weights), *weights[2:])


def dequantize_packed(weights: Sequence[Tensor | None], options: Mapping[str, Any], columns: int) -> Tensor:
    return reference.dequantize_wna16(*present(weights), *weights[2:], **options, columns=columns)


def present(weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The weight and its scales: the first two of ``weights``.

    Raises:
        ValueError: the weight or the scales are missing.
    """
    weight, scale = weights[:2]
    if weight is None or scale is None:
        raise ValueError("a quantized layer has a weight and scales")
    return weight, scale


OPS = (
    Op(
        reference.linear,
        (
            either("x", Kind.COMPUTE, "... K", Role.ACTIVATION),
            either("weight", Kind.COMPUTE, "N K"),
            optional(either("bias", Kind.COMPUTE, "N", Role.BIAS)),
        ),
        shape=linear,
        work=Work.LINEAR,
        absent={PROGRAM: "PyTorch's libraries multiply floats"},
        row_wise=True,
        any_dtype=True,
        sharding=Sharding.LINEAR,
    ),
    Op(
        reference.head_linear,
        (
            value("x", Kind.COMPUTE, "T H P"),
            either("weight", Kind.COMPUTE, "N K"),
            whole("num_heads", 1, MAX_INT, required=True),
            whole("first", 0, MAX_INT, required=True),
            whole("last", 1, MAX_INT, required=True),
            whole("transposed", 0, 1),
        ),
        shape=head_linear,
        work=Work.HEADS,
        absent={CUDA: "torch's BLAS multiplies floats"},
        row_wise=True,
        any_dtype=True,
        unshared="a latent has one KV head, which all queries read",
    ),
    Op(
        reference.quantize_per_token,
        (value("x", Kind.COMPUTE, "T ... K"), whole("group_size", 0, MAX_INT)),
        shape=quantize_per_token,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        sharding=Sharding.QUANTIZED,
    ),
    Op(
        reference.linear_w8a8,
        (CODES, SCALE, INT8_WEIGHT, GROUP_SCALE, BIAS, RESULT),
        shape=linear_w8a8,
        work=Work.LINEAR_8BIT,
        row_wise=True,
        dequantize=dequantize_int8,
        sharding=Sharding.LINEAR,
    ),
    Op(
        reference.linear_w4a8,
        (
            CODES,
            value("scale", Kind.FLOAT32, "T A", Role.ACTIVATION_SCALE),
            PACKED_WEIGHT,
            GROUP_SCALE,
            optional(weight("weight_minimum", Kind.FLOAT, "N G", Role.ZERO)),
            BIAS,
        ),
        shape=linear_w4a8,
        work=Work.LINEAR_8BIT,
        row_wise=True,
        dequantize=dequantize_int4,
        sharding=Sharding.LINEAR,
    ),
    Op(
        reference.linear_w8a16,
        (ROWS_X, INT8_WEIGHT, GROUP_SCALE, BIAS, Choice("precision", ("float32", "bfloat16"))),
        shape=linear_w8a16,
        work=Work.LINEAR_WEIGHT_ONLY,
        row_wise=True,
        dequantize=dequantize_int8,
        sharding=Sharding.LINEAR,
    ),
    Op(
        reference.linear_wna16,
        (
            ROWS_X,
            PACKED_WEIGHT,
            GROUP_SCALE,
            optional(weight("weight_zero_point", Kind.UINT8, "N G", Role.ZERO)),
            optional(weight("g_idx", Kind.INT32, "K", Role.CHANNELS, stored="weight_g_idx")),
            BIAS,
            Choice("bits", BITS),
            whole("group_size", 0, MAX_INT),
        ),
        shape=reference.linear_wna16,
        work=Work.LINEAR_WEIGHT_ONLY,
        row_wise=True,
        dequantize=dequantize_packed,
        sharding=Sharding.LINEAR,
    ),
)

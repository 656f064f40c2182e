"""Records of mixture-of-experts layers: linear layers with a weight for each expert, and the sum of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optkit.graph.ops.linear import (
    GROUP_SCALE,
    INT8_WEIGHT,
    PACKED_WEIGHT,
    dequantize_int4,
    dequantize_int8,
    dequantize_packed,
)
from optkit.graph.ops.operands import (
    BIAS,
    MAX_INT,
    Choice,
    Kind,
    Operand,
    Role,
    TensorOperand,
    either,
    expect,
    optional,
    value,
    weight,
    whole,
)
from optkit.graph.ops.record import CPU, CUDA, PROGRAM, Op, Work
from optkit.kernels import reference
from optkit.kernels.packed_codes import BITS

MAX_EXPERTS = 1 << 16
X = value("x", Kind.COMPUTE, "T ... K")
CODES = value("q", Kind.UINT8, "T ... K")
EXPERTS = value("experts", Kind.INT64, "T C", Role.TABLE)
NUM_EXPERTS = whole("num_experts", 1, MAX_EXPERTS, required=True)
NOT_ON_GPU = {CUDA: "experts on a GPU have a kernel for bfloat16 weights alone"}


def rows_of_experts(x: Tensor, weight: Tensor, experts: Tensor, num_experts: int) -> Tensor:
    """The result [T, J, N] for activations [T, K] or [T, J, K] and a weight with the rows of all experts."""
    expect(x.ndim == 2 or (x.ndim == 3 and x.shape[1] == experts.shape[1]), "a row of x a token or an expert")
    expect(x.shape[0] == experts.shape[0], "experts must be given for every token")
    expect(
        weight.shape[0] % num_experts == 0, f"{weight.shape[0]} rows are not those of {num_experts} experts"
    )
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return x.new_empty((*experts.shape, weight.shape[0] // num_experts), dtype=dtype)


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, *, num_experts: int
) -> Tensor:
    return rows_of_experts(x, weight, experts, num_experts)


def expert_w8a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    expect(scale.shape == (*q.shape[:-1], weight_scale.shape[1]), "an activation scale a group")
    expect(
        q.shape[-1] % weight_scale.shape[1] == 0, f"{weight_scale.shape[1]} groups of {q.shape[-1]} channels"
    )
    return rows_of_experts(q, weight, experts, num_experts)


def expert_w8a16(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, experts: Tensor, *, num_experts: int
) -> Tensor:
    expect(
        x.shape[-1] % weight_scale.shape[1] == 0, f"{weight_scale.shape[1]} groups of {x.shape[-1]} channels"
    )
    return rows_of_experts(x, weight, experts, num_experts).to(torch.float32)


def expert_w4a8(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
) -> Tensor:
    expect(q.shape[:-1] == scale.shape[:-1], "activation scales for every row")
    reference.check_int4(
        q[:1].flatten(0, -2), scale[:1].flatten(0, -2), weight, weight_scale, weight_minimum, bias
    )
    return rows_of_experts(q, weight, experts, num_experts)


def expert_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    experts: Tensor,
    *,
    num_experts: int,
    bits: int = 4,
    group_size: int = 0,
) -> Tensor:
    reference.check_wna16(x, weight, weight_scale, weight_zero_point, None, bias, bits, group_size)
    return rows_of_experts(x, weight, experts, num_experts)


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]))


def of_experts(
    spec: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    operands: tuple[TensorOperand, ...],
    *options: Operand,
    **facts: Any,
) -> Op:
    """The record of a linear layer with a weight for each expert: the last operands are the experts of each token."""
    return Op(
        spec,
        (*operands, EXPERTS, NUM_EXPERTS, *options),
        shape=shape,
        work=Work.EXPERTS,
        traceable=False,
        unshared="every rank has all experts",
        **facts,
    )


OPS = (
    of_experts(
        reference.expert_linear,
        expert_linear,
        (X, either("weight", Kind.COMPUTE, "N K"), optional(either("bias", Kind.COMPUTE, "N", Role.BIAS))),
        absent=dict.fromkeys((CPU, PROGRAM), "torch's BLAS multiplies floats, one expert after another"),
        any_dtype=True,
        linear=reference.linear,
    ),
    of_experts(
        reference.expert_w8a8,
        expert_w8a8,
        (
            CODES,
            value("scale", Kind.FLOAT32, "T ... G", Role.ACTIVATION_SCALE),
            INT8_WEIGHT,
            GROUP_SCALE,
            BIAS,
        ),
        absent=NOT_ON_GPU,
        dequantize=dequantize_int8,
        linear=reference.linear_w8a8,
    ),
    of_experts(
        reference.expert_w8a16,
        expert_w8a16,
        (X, INT8_WEIGHT, GROUP_SCALE, BIAS),
        absent=NOT_ON_GPU,
        dequantize=dequantize_int8,
        linear=reference.linear_w8a16,
    ),
    of_experts(
        reference.expert_w4a8,
        expert_w4a8,
        (
            CODES,
            value("scale", Kind.FLOAT32, "T ... A", Role.ACTIVATION_SCALE),
            PACKED_WEIGHT,
            GROUP_SCALE,
            optional(weight("weight_minimum", Kind.FLOAT, "N G", Role.ZERO)),
            BIAS,
        ),
        absent=NOT_ON_GPU,
        dequantize=dequantize_int4,
        linear=reference.linear_w4a8,
    ),
    of_experts(
        reference.expert_wna16,
        expert_wna16,
        (
            X,
            PACKED_WEIGHT,
            GROUP_SCALE,
            optional(weight("weight_zero_point", Kind.UINT8, "N G", Role.ZERO)),
            BIAS,
        ),
        Choice("bits", BITS),
        whole("group_size", 0, MAX_INT),
        absent=NOT_ON_GPU,
        dequantize=dequantize_packed,
        linear=reference.linear_wna16,
    ),
    Op(
        reference.weighted_sum,
        (value("x", Kind.COMPUTE, "T C N"), value("weights", Kind.COMPUTE, "T C")),
        shape=weighted_sum,
        work=Work.POINTWISE,
        absent={CUDA: "torch's own product and sum"},
        row_wise=True,
        any_dtype=True,
    ),
)

"""Records of linear layers in float8 E4M3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.graph.ops.linear import present
from optkit.graph.ops.norms import quantized
from optkit.graph.ops.operands import (
    BIAS,
    RESULT,
    ROWS_X,
    Choice,
    Kind,
    Role,
    X,
    expect,
    optional,
    value,
    weight,
)
from optkit.graph.ops.record import CPU, PROGRAM, Op, Sharding, Work
from optkit.kernels import reference

WEIGHT = weight("weight", Kind.FP8, "N K")
EMULATED = "CPUs have no float8 arithmetic; the reference emulates it in float32"


def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    expect(x.ndim == 2, "what is quantized must be [T, K]")
    return quantized(x, x.shape[1], "fp8")


def linear_fp8_rowwise(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> Tensor:
    reference.check_fp8_rowwise(q, scale, weight, weight_scale, bias)
    return torch.empty((q.shape[0], weight.shape[0]), dtype=getattr(torch, dtype), device=q.device)


def dequantize(weights: Sequence[Tensor | None], options: Mapping[str, Any], columns: int) -> Tensor:
    return reference.dequantize_fp8(*present(weights))


OPS = (
    Op(
        reference.quantize_fp8_per_token,
        (ROWS_X,),
        shape=quantize_fp8_per_token,
        work=Work.POINTWISE,
        absent={CPU: EMULATED, PROGRAM: EMULATED},
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.linear_fp8,
        (
            X,
            WEIGHT,
            weight("weight_scale", Kind.FLOAT32, "N G", Role.WEIGHT_SCALE),
            optional(weight("input_scale", Kind.FLOAT32, "1", Role.CHANNELS)),
            BIAS,
            Choice("activations", ("token", "tensor", "none")),
        ),
        shape=reference.linear_fp8,
        work=Work.LINEAR,
        absent={CPU: EMULATED, PROGRAM: EMULATED},
        row_wise=True,
        dequantize=dequantize,
        sharding=Sharding.LINEAR,
    ),
    Op(
        reference.linear_fp8_rowwise,
        (
            value("q", Kind.FP8, "T K"),
            value("scale", Kind.FLOAT32, "T 1", Role.ACTIVATION_SCALE),
            WEIGHT,
            weight("weight_scale", Kind.FLOAT32, "N 1", Role.WEIGHT_SCALE),
            BIAS,
            RESULT,
        ),
        shape=linear_fp8_rowwise,
        work=Work.LINEAR_8BIT,  # the rates are the same where there is float8
        absent={CPU: EMULATED, PROGRAM: EMULATED},
        row_wise=True,
        only_lowered=True,
        dequantize=dequantize,
    ),
)

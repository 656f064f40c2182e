"""Records of norms, with a float and with a quantized result."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.graph.ops.operands import (
    EPS,
    OFFSET,
    ROWS_X,
    Choice,
    Kind,
    Role,
    X,
    either,
    expect,
    optional,
    value,
)
from optkit.graph.ops.record import CPU, PROGRAM, Op, Work
from optkit.kernels import reference

WEIGHT = optional(either("weight", Kind.COMPUTE, "K"))
FMT = Choice("fmt", reference.FORMATS)
FUSED_BY_PROGRAMS = "on a CPU a program fuses the norm and the quantization itself"
GPU_ONLY = {CPU: FUSED_BY_PROGRAMS, PROGRAM: FUSED_BY_PROGRAMS}


def norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    expect(weight is None or tuple(weight.shape) == (x.shape[-1],), f"a norm weight must be [{x.shape[-1]}]")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    expect(x.shape == residual.shape, "a residual must have the shape of what is added")
    return norm(x, weight, eps, offset), torch.empty_like(x, memory_format=torch.contiguous_format)


def norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor]:
    norm(x, weight, eps, offset)
    return quantized(x, x.shape[1], fmt)


def add_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor, Tensor]:
    _, total = add_norm(x, residual, weight, eps, offset)
    return *quantized(x, x.shape[1], fmt), total


def quantized(x: Tensor, width: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Codes of rows of ``width`` values in format ``fmt``, and a scale a row."""
    expect(fmt in reference.FORMATS, f"activations are quantized as {' or '.join(reference.FORMATS)}")
    dtype = torch.uint8 if fmt == "int8" else torch.float8_e4m3fn
    q = torch.empty((x.shape[0], width), dtype=dtype, device=x.device)
    return q, torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)


OPS = (
    Op(
        reference.rms_norm,
        (X, WEIGHT, EPS, OFFSET),
        shape=norm,
        work=Work.POINTWISE,
        row_wise=True,
        per_head=True,
        compiled=True,
        quantized=reference.rms_norm_quantize,
    ),
    Op(
        reference.add_rms_norm,
        (X, value("residual", Kind.COMPUTE, "... K"), WEIGHT, EPS, OFFSET),
        shape=add_norm,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        quantized=reference.add_rms_norm_quantize,
    ),
    Op(
        reference.layer_norm,
        (X, WEIGHT, optional(either("bias", Kind.COMPUTE, "K", Role.BIAS)), EPS),
        shape=reference.layer_norm,
        work=Work.POINTWISE,
        row_wise=True,
        per_head=True,
        compiled=True,
    ),
    Op(
        reference.rms_norm_quantize,
        (ROWS_X, WEIGHT, EPS, OFFSET, FMT),
        shape=norm_quantize,
        work=Work.POINTWISE,
        absent=GPU_ONLY,
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.add_rms_norm_quantize,
        (ROWS_X, value("residual", Kind.COMPUTE, "T K"), WEIGHT, EPS, OFFSET, FMT),
        shape=add_norm_quantize,
        work=Work.POINTWISE,
        absent=GPU_ONLY,
        row_wise=True,
        only_lowered=True,
    ),
)

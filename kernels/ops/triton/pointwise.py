"""Norms and gates, alone or with the quantization of the result: a launch each, a program for each token.

The residual addition, the norm and the quantization of a decoder layer are one read of two rows and one write of two.
Sums are float32, in an order of the width alone, so a token's result has the same bits in any batch. Rows wider than
``MAX_COLUMNS`` run the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.kernels.triton.common import (
    MAX_COLUMNS,
    next_power_of_2,
    row_warps,
    rows_of,
    supports,
    supports_fp8,
)
from optkit.kernels.triton.quantize import CODES, FORMATS, NONE, codes

SILU, GELU, GELU_TANH = 0, 1, 2  # the constexpr GATE
GATES = {"none": GELU, "tanh": GELU_TANH}
GATE_COLUMNS = 1024  # of a gate's program where nothing has to be known of the whole row


@triton.jit
def rms_rows(
    x, residual, weight, total, out, scale, x_stride, residual_stride, columns, eps, offset,
    C: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """A row of ``rms_norm``; with ADD of ``residual + x``, which ``total`` gets; quantized by FORMAT."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    inside = column < columns
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    if WEIGHT:
        normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    put(normed, out, scale, row, columns, column, inside, FORMAT)


@triton.jit
def put(values, out, scale, row, columns, column, inside, FORMAT: tl.constexpr):
    """Write row ``row`` of ``out`` [T, columns], and of ``scale`` [T] for a quantized row."""
    if FORMAT == 0:
        tl.store(out + row * columns + column, values.to(out.dtype.element_ty), mask=inside)
    else:
        q, scales = codes(tl.where(inside, values, 0.0)[None, :], FORMAT)
        tl.store(out + row * columns + column[None, :], q, mask=inside[None, :])
        tl.store(scale + row + tl.arange(0, 1), scales)


@triton.jit
def layer_norm_rows(
    x, weight, bias, out, x_stride, columns, eps, C: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):
    """A row of ``layer_norm``. The variance is computed from the centred row, not as a difference of large sums."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    inside = column < columns
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / columns, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    if WEIGHT:
        normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(
    gate, up, out, scale, gate_stride, up_stride, columns,
    C: tl.constexpr, GATE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """``act(gate) * up`` of C columns of a row, for a quantized row of all columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == 0:
        g *= tl.sigmoid(g)
    elif GATE == 1:
        g *= 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    else:  # 1 + tanh(y) = 2 sigmoid(2 y)
        g *= tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    put(g * u, out, scale, row, columns, column, inside, FORMAT)


def output(rows: int, columns: int, like: Tensor, fmt: int) -> tuple[Tensor, Tensor]:
    """The tensors for rows and for scales; without a format, no scales."""
    out = torch.empty((rows, columns), dtype=CODES.get(fmt, like.dtype), device=like.device)
    scale = torch.empty((rows if fmt else 0, 1), dtype=torch.float32, device=like.device)
    return out, scale


def rms(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, fmt: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed or codes, scale, sum), flat; what was not asked for is empty or x."""
    x, added = rows_of(x), residual is not None
    residual = x if residual is None else rows_of(residual)
    rows, columns = x.shape
    out, scale = output(rows, columns, x, fmt)
    total = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if added else x
    block = next_power_of_2(columns)
    if rows:
        rms_rows[(rows,)](
            x, residual, x if weight is None else weight, total, out, scale,
            x.stride(0), residual.stride(0), columns, eps, float(offset),
            C=block, ADD=added, WEIGHT=weight is not None, FORMAT=fmt, num_warps=row_warps(block),
        )  # fmt: skip
    return out, scale, total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """See ``reference.rms_norm``."""
    if x.shape[-1] > MAX_COLUMNS:
        return reference.rms_norm(x, weight, eps, offset)
    return rms(x, None, weight, eps, offset, NONE)[0].view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    if x.shape[-1] > MAX_COLUMNS:
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    out, _, total = rms(x, residual, weight, eps, offset, NONE)
    return out.view(x.shape), total.view(x.shape)


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, fmt: str = "int8"
) -> tuple[Tensor, Tensor]:
    """See ``reference.rms_norm_quantize``."""
    if x.shape[-1] > MAX_COLUMNS:
        return reference.rms_norm_quantize(x, weight, eps, offset, fmt)
    return rms(x, None, weight, eps, offset, FORMATS[fmt])[:2]


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    fmt: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.add_rms_norm_quantize``."""
    if x.shape[-1] > MAX_COLUMNS:
        return reference.add_rms_norm_quantize(x, residual, weight, eps, offset, fmt)
    return rms(x, residual, weight, eps, offset, FORMATS[fmt])


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See ``reference.layer_norm``."""
    if x.shape[-1] > MAX_COLUMNS:
        return reference.layer_norm(x, weight, bias, eps)
    flat = rows_of(x)
    rows, columns = flat.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = next_power_of_2(columns)
    if rows:
        layer_norm_rows[(rows,)](
            flat, flat if weight is None else weight, flat if bias is None else bias, out,
            flat.stride(0), columns, eps,
            C=block, WEIGHT=weight is not None, BIAS=bias is not None, num_warps=row_warps(block),
        )  # fmt: skip
    return out.view(x.shape)


def gated(gate: Tensor, up: Tensor, kind: int, fmt: int = NONE) -> tuple[Tensor, Tensor]:
    """(product or codes, scale) of gate and up [T, F]."""
    gate, up = rows_of(gate), rows_of(up)
    rows, columns = gate.shape
    out, scale = output(rows, columns, gate, fmt)
    block = next_power_of_2(columns) if fmt else min(GATE_COLUMNS, next_power_of_2(columns))
    if rows:
        gate_rows[(rows, triton.cdiv(columns, block))](
            gate, up, out, scale, gate.stride(0), up.stride(0), columns,
            C=block, GATE=kind, FORMAT=fmt, num_warps=row_warps(block) if fmt else 4,
        )  # fmt: skip
    return out, scale


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    return gated(gate, up, SILU)[0].view(gate.shape)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """See ``reference.gelu_mul``."""
    return gated(gate, up, GATES[approximate])[0].view(gate.shape)


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul_packed``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up)


def gelu_mul_packed(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """See ``reference.gelu_mul_packed``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_mul(gate, up, approximate)


def silu_mul_quantize(gate_up: Tensor, fmt: str = "int8") -> tuple[Tensor, Tensor]:
    """See ``reference.silu_mul_quantize``."""
    if gate_up.shape[-1] > 2 * MAX_COLUMNS:
        return reference.silu_mul_quantize(gate_up, fmt)
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, SILU, FORMATS[fmt])


def gelu_mul_quantize(gate_up: Tensor, fmt: str = "int8", approximate: str = "none") -> tuple[Tensor, Tensor]:
    """See ``reference.gelu_mul_quantize``."""
    if gate_up.shape[-1] > 2 * MAX_COLUMNS:
        return reference.gelu_mul_quantize(gate_up, fmt, approximate)
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, GATES[approximate], FORMATS[fmt])


def to_fp8(options: Mapping[str, Any]) -> bool:
    return options.get("fmt") == "fp8"


def to_int8(options: Mapping[str, Any]) -> bool:
    return not to_fp8(options)


PLAIN = (rms_norm, add_rms_norm, layer_norm, silu_mul, gelu_mul, silu_mul_packed, gelu_mul_packed)
QUANTIZING = (rms_norm_quantize, add_rms_norm_quantize, silu_mul_quantize, gelu_mul_quantize)
KERNELS = (
    *(Kernel(fn.__name__, "triton", fn, supports) for fn in PLAIN),
    *(Kernel(fn.__name__, "triton", fn, supports, handles=to_int8) for fn in QUANTIZING),
    *(
        Kernel(fn.__name__, "triton", fn, supports_fp8, handles=to_fp8, needs="fp8: Hopper")
        for fn in QUANTIZING
    ),
)

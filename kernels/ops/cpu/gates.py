"""Gated activations and softplus by optkit's native kernels (pointwise.cpp): one pass over memory.

Tensors of other types than float32 run the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.emit import Emitter, Quantization, Result, quantized_buffers
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.cpu.rows import ROW_MAJOR, all_float32, are_rows_of, as_rows, pointer
from optkit.kernels.kernel import Kernel

SILU, GELU, GELU_TANH = 0, 1, 2  # of enum Activation in pointwise.h
GELUS = {"none": GELU, "tanh": GELU_TANH}


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """``act(gate) * up`` of float32 tensors of one shape."""
    gate, rows, width, gate_stride = as_rows(gate)
    up, _, _, up_stride = as_rows(up)
    out = torch.empty_like(gate, memory_format=ROW_MAJOR)
    native.library().optkit_gated(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        gate_stride,
        up_stride,
        activation,
        0,
        0,
        0,
        native.threads(),
    )
    return out


def gated_packed(gate_up: Tensor, activation: int) -> Tensor:
    """``act(gate) * up`` of the two halves of float32 [..., 2F], without the cost of making two views."""
    gate_up, rows, width, stride = as_rows(gate_up)
    half = width // 2
    out = torch.empty((*gate_up.shape[:-1], half))
    start = gate_up.data_ptr()
    native.library().optkit_gated(
        start,
        start + 4 * half,
        out.data_ptr(),
        rows,
        half,
        stride,
        stride,
        activation,
        0,
        0,
        0,
        native.threads(),
    )
    return out


def softplus(x: Tensor, bias: Tensor | None) -> Tensor:
    """See ``reference.softplus``."""
    if not all_float32(x, bias) or not are_rows_of(x, bias):
        return reference.softplus(x, bias)
    x, rows, width, stride = as_rows(x)
    out = torch.empty_like(x, memory_format=ROW_MAJOR)
    native.library().optkit_softplus(
        x.data_ptr(), pointer(bias), out.data_ptr(), rows, width, stride, native.threads()
    )
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    if not all_float32(gate, up) or gate.shape != up.shape:
        return reference.silu_mul(gate, up)
    return gated(gate, up, SILU)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """See ``reference.gelu_mul``."""
    if not all_float32(gate, up) or gate.shape != up.shape:
        return reference.gelu_mul(gate, up, approximate)
    return gated(gate, up, GELUS[approximate])


def silu_mul_packed(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul_packed``."""
    if not all_float32(gate_up) or gate_up.shape[-1] % 2:
        return reference.silu_mul_packed(gate_up)
    return gated_packed(gate_up, SILU)


def gelu_mul_packed(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """See ``reference.gelu_mul_packed``."""
    if not all_float32(gate_up) or gate_up.shape[-1] % 2:
        return reference.gelu_mul_packed(gate_up, approximate)
    return gated_packed(gate_up, GELUS[approximate])


# -- in programs -----------------------------------------------------------------------------------------


def emit_gated(
    b: Builder, gate: View, up: View, activation: int, quantized: Quantization | None, each: int = 1
) -> Result:
    """``each`` is the number of rows of a token."""
    out = b.buffer(gate.rows, gate.shape) if quantized is None or quantized.keep else None
    q, scale, group = quantized_buffers(b, gate, quantized)
    b.call(
        "gated", by_rows=True, gate=gate, up=up, out=out, rows=Size(gate.rows, each), width=gate.width // each,
        gate_stride=gate.row_stride // each, up_stride=up.row_stride // each, activation=activation, q=q,
        scale=scale, group=group,
    )  # fmt: skip
    return out, q, scale


def emit_packed(b: Builder, gate_up: View, activation: int, quantized: Quantization | None) -> Result:
    """The two halves of a row a token, or of each of several dense rows a token."""
    *rows, width = gate_up.shape
    each = gate_up.width // width
    if each > 1 and gate_up.row_stride != gate_up.width:
        raise NotImplementedError("rows of each expert must be dense")
    gate = replace(gate_up, shape=(*rows, width // 2))
    return emit_gated(b, gate, replace(gate, offset=gate.offset + width // 2), activation, quantized, each)


def emit_softplus(b: Builder, x: View, bias: Tensor | None) -> Result:
    out = b.buffer(x.rows, x.shape)
    if bias is not None and bias.shape != (x.width,):
        raise NotImplementedError("a bias of a row's last dimension alone")
    b.call(
        "softplus", by_rows=True, x=x, bias=bias, out=out, rows=Size(x.rows), width=x.width, x_stride=x.row_stride
    )  # fmt: skip
    return (out,)


def emit_silu_mul(b: Builder, gate: View, up: View, quantized: Quantization | None = None) -> Result:
    return emit_gated(b, gate, up, SILU, quantized)


def emit_silu_mul_packed(b: Builder, gate_up: View, quantized: Quantization | None = None) -> Result:
    return emit_packed(b, gate_up, SILU, quantized)


def emit_gelu_mul(
    b: Builder, gate: View, up: View, approximate: str = "none", quantized: Quantization | None = None
) -> Result:
    return emit_gated(b, gate, up, GELUS[approximate], quantized)


def emit_gelu_mul_packed(
    b: Builder, gate_up: View, approximate: str = "none", quantized: Quantization | None = None
) -> Result:
    return emit_packed(b, gate_up, GELUS[approximate], quantized)


KERNELS = (
    Kernel("softplus", "native", softplus, native.supports),
    Kernel("silu_mul", "native", silu_mul, native.supports),
    Kernel("gelu_mul", "native", gelu_mul, native.supports),
    Kernel("silu_mul_packed", "native", silu_mul_packed, native.supports),
    Kernel("gelu_mul_packed", "native", gelu_mul_packed, native.supports),
)
EMITTERS = (
    Emitter("softplus", emit_softplus),
    Emitter("silu_mul", emit_silu_mul, fuses_quantization=True),
    Emitter("gelu_mul", emit_gelu_mul, fuses_quantization=True),
    Emitter("silu_mul_packed", emit_silu_mul_packed, fuses_quantization=True),
    Emitter("gelu_mul_packed", emit_gelu_mul_packed, fuses_quantization=True),
)

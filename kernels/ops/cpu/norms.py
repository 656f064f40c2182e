"""Norms by optkit's native kernels (pointwise.cpp): one pass over memory for a norm, where PyTorch makes a pass a
step.

Tensors of other types than float32 run the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.emit import Emitter, Quantization, Result, quantized_buffers
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.cpu.rows import ROW_MAJOR, all_float32, are_rows_of, as_rows, pointer
from optkit.kernels.kernel import Kernel

NO_QUANTIZATION = (0, 0, 0)  # q, scale and group


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """See ``reference.rms_norm``."""
    if not (all_float32(x, weight) and are_rows_of(x, weight)):
        return reference.rms_norm(x, weight, eps, offset)
    x, rows, width, stride = as_rows(x)
    out = torch.empty_like(x, memory_format=ROW_MAJOR)
    native.library().optkit_rms_norm(
        x.data_ptr(),
        0,
        pointer(weight),
        out.data_ptr(),
        0,
        rows,
        width,
        stride,
        0,
        1,
        eps,
        offset,
        *NO_QUANTIZATION,
        native.threads(),
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    if not (all_float32(x, residual, weight) and are_rows_of(x, weight)) or x.shape != residual.shape:
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    x, rows, width, stride = as_rows(x)
    residual, _, _, residual_stride = as_rows(residual)
    out, total = torch.empty_like(x, memory_format=ROW_MAJOR), torch.empty_like(x, memory_format=ROW_MAJOR)
    native.library().optkit_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        pointer(weight),
        out.data_ptr(),
        total.data_ptr(),
        rows,
        width,
        stride,
        residual_stride,
        1,
        eps,
        offset,
        *NO_QUANTIZATION,
        native.threads(),
    )
    return out, total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See ``reference.layer_norm``."""
    if not (all_float32(x, weight, bias) and are_rows_of(x, weight, bias)):
        return reference.layer_norm(x, weight, bias, eps)
    x, rows, width, stride = as_rows(x)
    out = torch.empty_like(x, memory_format=ROW_MAJOR)
    native.library().optkit_layer_norm(
        x.data_ptr(),
        pointer(weight),
        pointer(bias),
        out.data_ptr(),
        rows,
        width,
        stride,
        1,
        eps,
        *NO_QUANTIZATION,
        native.threads(),
    )
    return out


# -- in programs -----------------------------------------------------------------------------------------


def row_arguments(b: Builder, x: View, quantized: Quantization | None) -> dict[str, Any]:
    """The arguments of all norms: buffers of results, and the rows of ``x`` over its last dimension.

    Raises:
        NotImplementedError: heads of a token are normalized and quantized at once.
    """
    parts, width = x.width // x.shape[-1], x.shape[-1]
    if parts > 1 and quantized:
        raise NotImplementedError("a norm of heads that is quantized")
    out = b.buffer(x.rows, x.shape) if quantized is None or quantized.keep else None
    q, scale, group = quantized_buffers(b, x, quantized)
    rows = {"x": x, "x_stride": x.row_stride, "rows": Size(x.rows, parts), "width": width, "parts": parts}
    return {**rows, "out": out, "q": q, "scale": scale, "group": group}


def emit_rms_norm(
    b: Builder,
    x: View,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    quantized: Quantization | None = None,
) -> Result:
    given = row_arguments(b, x, quantized)
    b.call(
        "rms_norm", by_rows=True, **given, residual=None, residual_stride=0, total=None, weight=weight, eps=float(eps),
        offset=float(offset),
    )  # fmt: skip
    return given["out"], given["q"], given["scale"]


def emit_add_rms_norm(
    b: Builder,
    x: View,
    residual: View,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    quantized: Quantization | None = None,
) -> Result:
    if x.width > x.shape[-1]:
        raise NotImplementedError("a norm of heads with a residual")
    given, total = row_arguments(b, x, quantized), b.buffer(x.rows, x.shape)
    b.call(
        "rms_norm", by_rows=True,
        **given, residual=residual, residual_stride=residual.row_stride, total=total, weight=weight,
        eps=float(eps), offset=float(offset),
    )  # fmt: skip
    return given["out"], total, given["q"], given["scale"]


def emit_layer_norm(
    b: Builder,
    x: View,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    quantized: Quantization | None = None,
) -> Result:
    given = row_arguments(b, x, quantized)
    b.call("layer_norm", by_rows=True, **given, weight=weight, bias=bias, eps=float(eps))
    return given["out"], given["q"], given["scale"]


KERNELS = (
    Kernel("rms_norm", "native", rms_norm, native.supports),
    Kernel("add_rms_norm", "native", add_rms_norm, native.supports),
    Kernel("layer_norm", "native", layer_norm, native.supports),
)
EMITTERS = (
    Emitter("rms_norm", emit_rms_norm, fuses_quantization=True),
    Emitter("add_rms_norm", emit_add_rms_norm, fuses_quantization=True),
    Emitter("layer_norm", emit_layer_norm, fuses_quantization=True),
)

"""Rotary embedding by optkit's native kernels (pointwise.cpp): one pass over memory.

Tensors of other types than float32 run the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.cpu.rows import all_float32
from optkit.kernels.kernel import Kernel


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rope``; x is often a view of a fused projection."""
    table = (x.shape[0], x.shape[2])
    if not all_float32(x, cos, sin) or not cos.shape == sin.shape == table:
        return reference.rope(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    if cos.stride(1) != 1 or sin.stride(1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, dim = x.shape
    token, head, _ = x.stride()
    out = torch.empty((rows, heads, dim))
    native.library().optkit_rope(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        dim,
        token,
        head,
        cos.stride(0),
        sin.stride(0),
        native.threads(),
    )
    return out


def rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """See ``reference.rope_table``."""
    if positions.dtype is not torch.int64 or not all_float32(inv_freq):
        return reference.rope_table(positions, inv_freq, scale)
    positions, inv_freq = positions.contiguous(), inv_freq.contiguous()
    rows, half = len(positions), len(inv_freq)
    cos, sin = torch.empty((rows, 2 * half)), torch.empty((rows, 2 * half))
    native.library().optkit_rope_table(
        positions.data_ptr(),
        inv_freq.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        half,
        scale,
        native.threads(),
    )
    return cos, sin


# -- in programs -----------------------------------------------------------------------------------------


def emit_rope(b: Builder, x: View, cos: View, sin: View) -> Result:
    (heads, dim), out = x.shape, b.buffer(x.rows, x.shape)
    b.call(
        "rope", by_rows=True,
        x=x, cos=cos, sin=sin, out=out, rows=Size(x.rows), heads=heads, dim=dim, x_token=x.row_stride,
        x_head=dim, cos_stride=cos.row_stride, sin_stride=sin.row_stride,
    )  # fmt: skip
    return (out,)


def emit_rope_table(b: Builder, positions: View, inv_freq: Tensor, scale: float = 1.0) -> Result:
    half = len(inv_freq)
    cos, sin = (b.buffer(positions.rows, (2 * half,)) for _ in range(2))
    b.call(
        "rope_table", by_rows=True,
        positions=positions, inv_freq=inv_freq, cos=cos, sin=sin, rows=Size(positions.rows), half=half,
        scale=float(scale),
    )  # fmt: skip
    return cos, sin


KERNELS = (
    Kernel("rope_table", "native", rope_table, native.supports),
    Kernel("rope", "native", rope, native.supports),
)
EMITTERS = (Emitter("rope", emit_rope), Emitter("rope_table", emit_rope_table))

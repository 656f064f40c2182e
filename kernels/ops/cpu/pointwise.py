"""Norms, gated activations and rotary embedding by optkit's native kernels (pointwise.cpp).

One pass over memory each, where PyTorch makes one a step. Rows of float32 whose elements are neighbours are read in
place, whatever the distance between rows; anything else is made so first, and other types run the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels import Kernel, reference
from optkit.kernels.cpu import native

SILU, GELU, GELU_TANH = 0, 1, 2  # of optkit_gated
FLOAT32, ROW_MAJOR = torch.float32, torch.contiguous_format
GELUS = {"none": GELU, "tanh": GELU_TANH}


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
        eps,
        offset,
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
        eps,
        offset,
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
        eps,
        native.threads(),
    )
    return out


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
        start, start + 4 * half, out.data_ptr(), rows, half, stride, stride, activation, native.threads()
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


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rope``; x is often a view of a fused projection."""
    table = (x.shape[0], x.shape[2])
    alike = cos.shape == sin.shape == table and cos.stride() == sin.stride()
    if not (all_float32(x, cos, sin) and alike):
        return reference.rope(x, cos, sin)
    if x.stride(2) != 1:
        x = x.contiguous()
    if cos.stride(1) != 1:
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


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as rows of neighbouring elements: ``(x, rows, width, distance between rows)``, copied where it must be."""
    if x.dim() == 2:
        rows, width = x.shape
        stride, step = x.stride()
        if step == 1:
            return x, rows, width, stride
    x, width = x.contiguous(), x.shape[-1]
    return x, x.numel() // width, width, width


def all_float32(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator costs more than all the rest of a small call
        if tensor is not None and tensor.dtype is not FLOAT32:
            return False
    return True


def are_rows_of(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether each vector is as long as a row of ``x``, and dense: kernels take its address."""
    for vector in vectors:
        if vector is not None and not (vector.shape == x.shape[-1:] and vector.is_contiguous()):
            return False
    return True


def pointer(tensor: Tensor | None) -> int:
    """Of a contiguous vector; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


KERNELS = tuple(
    Kernel(fn.__name__, "native", fn, native.supports)
    for fn in (
        rms_norm,
        add_rms_norm,
        layer_norm,
        silu_mul,
        gelu_mul,
        silu_mul_packed,
        gelu_mul_packed,
        rope_table,
        rope,
    )
)

"""How each dialect op becomes calls of a program: one function an op, one row in ``EMITTERS``.

An emitter gets the program's builder and the op's arguments, with views where the op takes activations and packed
tensors where it takes weights, and gives the views of the op's results. ``quantized`` is what the builder asks of
an op whose result is quantized next: the group size, and whether the float result is wanted too. Ops that can do
both in one pass over the row are in ``FUSES_QUANTIZATION``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cpu.int8 import PANEL, STEP
from optkit.kernels.cpu.pointwise import GELUS, SILU
from optkit.kernels.cpu.program import BLOCK_SIZE, LOGITS, SEQUENCES, TABLE_WIDTH, Builder, Size, View
from optkit.kernels.cpu.wna16 import levels


@dataclass(frozen=True)
class Quantization:
    """The int8 form of an op's result that is wanted, and whether the result itself is (``keep``)."""

    group_size: int
    keep: bool


Result = tuple[View | None, ...]


def quantized_buffers(b: Builder, like: View, wanted: Quantization | None) -> tuple[Any, Any, int]:
    """Buffers for q and scale, and the group; nothing where no quantization is wanted."""
    if wanted is None:
        return None, None, 0
    group = wanted.group_size or like.width
    q = b.buffer(like.rows, like.shape, torch.uint8)
    return q, b.buffer(like.rows, (like.width // group,)), group


def embedding(b: Builder, weight: Tensor, ids: View) -> Result:
    out = b.buffer(ids.rows, weight.shape[1:])
    b.call("gather_rows", weight, ids, out, Size(ids.rows), weight.shape[0], out.width * weight.itemsize)
    return (out,)


def select_rows(b: Builder, x: View, index: View) -> Result:
    out = b.buffer(LOGITS, x.shape)
    b.call("gather_rows", x, index, out, Size(LOGITS), Size(x.rows), x.width * x.dtype.itemsize)
    return (out,)


def norm(
    b: Builder,
    op: str,
    x: View,
    residual: View | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    quantized: Quantization | None,
) -> Result:
    """Results: normed, total (where there is a residual), q, scale. Norms are over the last dimension."""
    parts, width = x.width // x.shape[-1], x.shape[-1]
    if parts > 1 and (residual or quantized):
        raise NotImplementedError("a norm of heads with a residual or quantized")
    out = b.buffer(x.rows, x.shape) if quantized is None or quantized.keep else None
    total = b.buffer(x.rows, x.shape) if residual else None
    q, scale, group = quantized_buffers(b, x, quantized)
    b.call(
        op, x, residual, weight, bias, out, total, Size(x.rows, parts), width, x.row_stride,
        residual.row_stride if residual else 0, parts, float(eps), float(offset), q, scale, group,
    )  # fmt: skip
    return out, total, q, scale


def rms_norm(
    b: Builder,
    x: View,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    quantized: Quantization | None = None,
) -> Result:
    out, _, q, scale = norm(b, "rms_norm", x, None, weight, None, eps, offset, quantized)
    return out, q, scale


def add_rms_norm(
    b: Builder,
    x: View,
    residual: View,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    quantized: Quantization | None = None,
) -> Result:
    return norm(b, "rms_norm", x, residual, weight, None, eps, offset, quantized)


def layer_norm(
    b: Builder,
    x: View,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    quantized: Quantization | None = None,
) -> Result:
    out, _, q, scale = norm(b, "layer_norm", x, None, weight, bias, eps, 0.0, quantized)
    return out, q, scale


def gated(b: Builder, gate: View, up: View, activation: int, quantized: Quantization | None) -> Result:
    out = b.buffer(gate.rows, gate.shape) if quantized is None or quantized.keep else None
    q, scale, group = quantized_buffers(b, gate, quantized)
    b.call(
        "gated",
        gate,
        up,
        out,
        Size(gate.rows),
        gate.width,
        gate.row_stride,
        up.row_stride,
        activation,
        q,
        scale,
        group,
    )
    return out, q, scale


def halves(gate_up: View) -> tuple[View, View]:
    gate, up = gate_up.split([gate_up.width // 2] * 2)
    return gate, up


def silu_mul(b: Builder, gate: View, up: View, quantized: Quantization | None = None) -> Result:
    return gated(b, gate, up, SILU, quantized)


def silu_mul_packed(b: Builder, gate_up: View, quantized: Quantization | None = None) -> Result:
    gate, up = halves(gate_up)
    return gated(b, gate, up, SILU, quantized)


def gelu_mul(
    b: Builder, gate: View, up: View, approximate: str = "none", quantized: Quantization | None = None
) -> Result:
    return gated(b, gate, up, GELUS[approximate], quantized)


def gelu_mul_packed(
    b: Builder, gate_up: View, approximate: str = "none", quantized: Quantization | None = None
) -> Result:
    gate, up = halves(gate_up)
    return gated(b, gate, up, GELUS[approximate], quantized)


def rope_table(b: Builder, positions: View, inv_freq: Tensor, scale: float = 1.0) -> Result:
    half = len(inv_freq)
    cos, sin = (b.buffer(positions.rows, (2 * half,)) for _ in range(2))
    b.call("rope_table", positions, inv_freq, cos, sin, Size(positions.rows), half, float(scale))
    return cos, sin


def rope(b: Builder, x: View, cos: View, sin: View) -> Result:
    heads, dim = x.shape
    if cos.row_stride != sin.row_stride:
        raise NotImplementedError("cosines and sines of several layouts")
    out = b.buffer(x.rows, x.shape)
    b.call("rope", x, cos, sin, out, Size(x.rows), heads, dim, x.row_stride, dim, cos.row_stride)
    return (out,)


def add(b: Builder, left: View, right: View) -> Result:
    out = b.buffer(left.rows, left.shape)
    b.call("add", left, right, out, Size(left.rows), left.width, left.row_stride, right.row_stride)
    return (out,)


def quantize_per_token(b: Builder, x: View, group_size: int = 0) -> Result:
    q, scale, group = quantized_buffers(b, x, Quantization(group_size, keep=True))
    b.call("quantize", x, x.row_stride, q, scale, Size(x.rows), x.width, group)
    return q, scale


def whole_steps(k: int) -> int:
    if k % STEP:
        raise NotImplementedError(f"{k} input channels are no whole steps")
    return k


def packed_offsets(weight: Tensor, k: int) -> Tensor:
    """The end of a packed weight, after its panels."""
    return weight.view(-1)[-(-weight.shape[0] // PANEL) * PANEL * whole_steps(k) :]


def linear_w8a8(
    b: Builder, q: View, scale: View, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Result:
    out = b.buffer(q.rows, (weight.shape[0],))
    b.call(
        "linear_w8a8", q, q.row_stride, scale, weight, packed_offsets(weight, q.width), weight_scale, bias, out,
        Size(q.rows), q.width, weight.shape[0], weight_scale.shape[1],
    )  # fmt: skip
    return (out,)


def linear_w8a16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    order: Tensor | None = None,
) -> Result:
    out = b.buffer(x.rows, (weight.shape[0],))
    b.call(
        "linear_w8a16", x, x.row_stride, order, weight, packed_offsets(weight, x.width), weight_scale, bias, out,
        Size(x.rows), x.width, weight.shape[0], weight_scale.shape[1],
    )  # fmt: skip
    return (out,)


def linear_w4a8(
    b: Builder,
    q: View,
    scale: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_minimum: Tensor | None,
    bias: Tensor | None = None,
) -> Result:
    n, out = weight.shape[0], b.buffer(q.rows, (weight.shape[0],))
    half = int(weight_scale.dtype == torch.float16)
    b.call(
        "linear_w4a8", q, q.row_stride, scale, weight, bias, out, Size(q.rows), q.width, n, weight_scale.shape[1],
        scale.width, half, int(weight_minimum is not None),
    )  # fmt: skip
    return (out,)


def linear_wna16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 0,
) -> Result:
    if bits == 8:
        return linear_w8a16(b, x, weight, weight_scale, bias, g_idx)
    n, out, (groups, group) = weight.shape[0], b.buffer(x.rows, (weight.shape[0],)), weight_scale.shape[1:]
    if x.width != groups * group:
        raise NotImplementedError(f"{x.width} input channels are no whole words of codes")
    half = int(weight_scale.dtype == torch.float16)
    b.call(
        "linear_w4a16", x, x.row_stride, g_idx, weight, bias, out, Size(x.rows), x.width, n, groups, half,
        levels(weight_zero),
    )  # fmt: skip
    return (out,)


def attention(
    b: Builder,
    q: View,
    k: View,
    v: View,
    k_cache: View,
    v_cache: View,
    slot_mapping: View,
    query_start: View,
    seq_lens: View,
    block_tables: View,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Result:
    (heads, dim), (kv_heads, v_dim) = q.shape, v.shape
    out = b.buffer(q.rows, (heads, v_dim))
    b.call(
        "attention", q, k, v, k_cache, v_cache, out, slot_mapping, query_start, seq_lens, block_tables,
        Size(q.rows), Size(SEQUENCES), Size(TABLE_WIDTH), Size(BLOCK_SIZE), q.row_stride, dim, k.row_stride, dim,
        v.row_stride, v_dim, heads, kv_heads, dim, v_dim, window, float(scale), float(softcap),
        int(k_cache.dtype is torch.int8),
    )  # fmt: skip
    return (out,)


EMITTERS: dict[str, Callable[..., Result]] = {
    f.__name__: f
    for f in (
        embedding,
        select_rows,
        rms_norm,
        add_rms_norm,
        layer_norm,
        silu_mul,
        silu_mul_packed,
        gelu_mul,
        gelu_mul_packed,
        rope_table,
        rope,
        quantize_per_token,
        linear_w8a8,
        linear_w4a8,
        linear_w8a16,
        linear_wna16,
        attention,
    )
} | {"aten.add.Tensor": add}
FUSES_QUANTIZATION = frozenset(
    ("rms_norm", "add_rms_norm", "layer_norm", "silu_mul", "silu_mul_packed", "gelu_mul", "gelu_mul_packed")
)

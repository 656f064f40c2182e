"""Weight-only linear layers of packed codes by optkit's native kernels (w4a16.cpp, w8a16.cpp).

Codes of 2 and 3 bits are packed as 4-bit codes: decode then reads as much as for 4 bits, still many times faster than
dequantization. Symmetric codes of 8 bits are int8 weights. Activations keep 16 bits.

Input channels out of order (``g_idx``) are sorted by group once, in the weight; at run time the columns of the
activations are read in the same order. With a shorter last group, all groups are cut to a length that divides both,
with the same scales.

A row's result has the same bits in any batch, with any number of threads and on any instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cpu import int4, int8, native
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.kernel import Kernel
from optkit.kernels.packed_codes import WORD, unpack_codes

WEIGHT, SCALE, ZERO, G_IDX = 1, 2, 3, 4  # positions among the arguments
UP_TO_4_BITS = "up to 4 bits; groups of whole 8 channels, equal ones with act-order"
EIGHT_BITS = "8 bits, symmetric; groups of whole 8 channels, equal ones with act-order"
MIDDLE = 8  # the code that stands for 0 in symmetric int4


def linear_wna16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 0,
) -> Tensor:
    """See ``reference.linear_wna16``; everything but the bias is packed, and ``g_idx`` is the order of the columns."""
    if bits == 8:
        return int8.weight_only(F.pad(x, (0, -x.shape[1] % int8.STEP)), weight, weight_scale, bias, g_idx)
    groups, group = weight_scale.shape[1:]
    rows, k, n = len(x), groups * group, weight.shape[0]
    if x.shape[1] < k:
        x = F.pad(x, (0, k - x.shape[1]))
    if x.stride(1) != 1 or x.dtype != torch.float32:
        x = x.to(torch.float32).contiguous()
    native.require(x.shape[1] == k, f"activations of {x.shape[1]} channels, the weight was packed for {k}")
    native.require_vector(g_idx, k, torch.int32, "g_idx")
    int4.check_packed(weight, weight_scale, k, levels(weight_zero_point), bias)
    out = torch.empty((rows, n))
    native.library().optkit_linear_w4a16(
        x.data_ptr(),
        x.stride(0),
        0 if g_idx is None else g_idx.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        n,
        k,
        groups,
        weight_scale.dtype == torch.float16,
        levels(weight_zero_point),
        native.threads(),
    )
    return out


def levels(weight_zero_point: Tensor | None) -> int:
    return int4.SYMMETRIC if weight_zero_point is None else int4.ZERO_POINT


def pack_w4(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Codes of up to 4 bits in the layout of int4.cpp.

    The weight becomes a uint8 blob of codes, scales and zero points; the scales an empty tensor [0, G, group] of the
    scales' dtype; the zero points an empty tensor; g_idx the order of the columns, int32 [K].
    """
    bits = options["bits"]
    codes, order, scale, zero, group = in_order(weights, options)
    if zero is None:
        codes += MIDDLE - (1 << (bits - 1))
    (n, k), groups = codes.shape, scale.shape[1]
    scale = int8.half_if_exact(scale)
    pairs = codes.unflatten(1, (-1, 2))
    nibbles = (pairs[..., 0] | pairs[..., 1] << 4).contiguous()
    blob = int4.pack_records(nibbles, scale, zero, n, k, levels(zero))
    packed = {WEIGHT: blob, SCALE: torch.empty(0, groups, group, dtype=scale.dtype)}
    packed |= {} if zero is None else {ZERO: torch.empty(0, dtype=torch.uint8)}
    return packed | ({} if order is None else {G_IDX: order})


def pack_w8(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Symmetric codes of 8 bits in the layout of int8.cpp."""
    codes, order, scale, _, _ = in_order(weights, options)
    signed = (codes ^ 128).view(torch.int8)
    packed = int8.pack({WEIGHT: signed, SCALE: scale.to(torch.float32)})
    return packed | ({} if order is None else {G_IDX: order})


def in_order(
    weights: dict[int, Tensor], options: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, int]:
    """(codes [N, K], order [K], scale [N, G], zero [N, G], group) with equal groups of ``group`` channels in a row.

    Without g_idx K is rounded up: what is past the layer's channels meets activations of 0.
    """
    bits, group_size = options["bits"], options.get("group_size", 0)
    scale, zero, g_idx = weights[SCALE], weights.get(ZERO), weights.get(G_IDX)
    columns = weights[WEIGHT].shape[1] * WORD // bits if g_idx is None else len(g_idx)
    order = None
    if g_idx is not None:
        order = g_idx.argsort(stable=True)
        group_size = int(g_idx.bincount().amax())
    elif group_size:
        columns = min(columns, scale.shape[1] * group_size)
    codes = unpack_codes(weights[WEIGHT], bits, columns)
    if bits < 8:
        codes = F.pad(codes, (0, -columns % int4.PAIR))
        columns = codes.shape[1]
    if order is not None:
        codes, order = codes[:, order], order.to(torch.int32)
    group = math.gcd(columns, group_size or columns)
    if group != (group_size or columns):  # of which group is each short one
        source = torch.arange(columns // group) * group // group_size
        scale, zero = scale[:, source], None if zero is None else zero[:, source]
    return codes, order, scale.contiguous(), None if zero is None else zero.contiguous(), group


def sortable(weights: dict[int, Tensor]) -> bool:
    """True without g_idx, and for groups of whole pairs of steps; a g_idx on the meta device counts as such."""
    g_idx = weights.get(G_IDX)
    if g_idx is None or g_idx.device.type == "meta":
        return True
    size = int(g_idx.bincount().amax())
    even = torch.equal(g_idx.sort().values, torch.arange(len(g_idx), dtype=torch.int32) // size)
    groups = -(-len(g_idx) // size) == weights[SCALE].shape[1]  # each is used
    return even and groups and size % int4.PAIR == 0 and len(g_idx) % int4.PAIR == 0


def whole_pairs(options: Mapping[str, Any]) -> bool:
    """Codes of up to 4 bits in one group, or in groups of whole pairs of steps."""
    return options.get("bits") in (2, 3, 4) and options.get("group_size", 0) % int4.PAIR == 0


def eight_bits(options: Mapping[str, Any]) -> bool:
    return options.get("bits") == 8 and options.get("group_size", 0) % int4.PAIR == 0


def symmetric(weights: dict[int, Tensor]) -> bool:
    return ZERO not in weights and sortable(weights)


def emit_linear_wna16(
    b: Builder,
    x: View,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int = 0,
) -> Result:
    if bits == 8:
        return int8.emit_weight_only(b, x, weight, weight_scale, bias, g_idx)
    n, out, (groups, group) = weight.shape[0], b.buffer(x.rows, (weight.shape[0],)), weight_scale.shape[1:]
    if x.width != groups * group:
        raise NotImplementedError(f"{x.width} input channels are no whole words of codes")
    b.call(
        "linear_w4a16", by_rows=True,
        x=x, x_stride=x.row_stride, order=g_idx, weight=weight, bias=bias, out=out, rows=Size(x.rows),
        n=n, k=x.width, groups=groups, half=weight_scale.dtype == torch.float16, levels=levels(weight_zero_point),
    )  # fmt: skip
    return (out,)


KERNELS = (
    Kernel(
        "linear_wna16", "native", linear_wna16, native.supports, pack_w4, sortable, whole_pairs, UP_TO_4_BITS
    ),
    Kernel(
        "linear_wna16", "native", linear_wna16, native.supports, pack_w8, symmetric, eight_bits, EIGHT_BITS
    ),
)
EMITTERS = (Emitter("linear_wna16", emit_linear_wna16),)

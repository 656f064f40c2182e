"""Weight-only linear layers of packed codes of 2 to 4 bits, for 1 to a few dozen tokens; and the codes' dequantization.

Codes are kept as 4 bits. Input channels are cut into slabs of 128; word j of a slab's 16 int32 holds, from the lowest
bits on, channels j, 16 + j, ..., 112 + j. So the eight codes of consecutive words are eight planes of 16 consecutive
channels: each plane meets a contiguous piece of the activations, and no code changes place in a tile. Rows of
words are contiguous, [N, slabs * 16].

A group's channels fill whole planes. Packing lays out all other groups, and channels out of order (``g_idx``), in the
same way, with codes of value zero between, and ``order`` holds the channel of each place, one past the last for none.

For up to ``gemv.MAX_ROWS`` tokens (``gemv_codes``) a code becomes a float as the mantissa of a 1.0, in a single
instruction instead of a conversion's several: two codes of a word are shifted to bits 15 and 19, for 1 + code / 256 and
1 + code / 16. The surplus is the sum of activations, the same for all channels. For more tokens (``tile_codes``) codes
become 16-bit floats for the tensor cores in the same way, 1024 + code or 128 + code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels.packed_codes import WORD, unpack_codes
from optkit.kernels.triton.common import Config, architecture, next_power_of_2
from optkit.kernels.triton.gemv import finish, has
from optkit.kernels.triton.tile import REDUCED, config_of, reduce_splits, splits_of

WEIGHT, SCALE, ZERO, G_IDX = 1, 2, 3, 4  # positions among the arguments
PLANE, PLANES = 16, 8
SLAB = PLANE * PLANES
ONE = 0x3F800000  # the bits of 1.0; an argument, since an instruction has room for one constant, and the mask is that
MIDDLE = 8  # the code that stands for 0 in symmetric int4
# By type of the activations: bits whose float plus a code is exact, and that float.
MAGIC = {torch.float16: (0x6400, 1024.0), torch.bfloat16: (0x4300, 128.0), torch.float32: (0, 0.0)}

# Output channels and slabs of a program, by tokens; a thread has four words of a row, 128 bits.
GEMV: dict[str, dict[int, Config]] = {
    "sm_80": {1: Config((8, 16), 2), 2: Config((2, 16), 2), 4: Config((2, 16), 2)},
    "sm_90": {1: Config((8, 32), 4), 2: Config((2, 32), 4), 4: Config((2, 32), 4)},
}
# Tokens and channels of a tile, by most tokens.
TILES: dict[str, dict[int, Config]] = {
    "sm_80": {16: Config((16, 128), 4, 4), 32: Config((32, 128), 4, 3), 1 << 30: Config((64, 128), 8, 3)},
    "sm_90": {16: Config((16, 128), 4, 4), 32: Config((32, 128), 4, 4), 1 << 30: Config((64, 128), 8, 4)},
}


@triton.jit
def gemv_codes(
    x, order, words, scale, zero, bias, out, x_stride, rows, n_size, k_size, slabs, group, groups, one,
    M: tl.constexpr, N: tl.constexpr, SLABS: tl.constexpr, SHARED: tl.constexpr,
    HAS_ZERO: tl.constexpr, ORDERED: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    """out [rows, n_size] of N channels and all of K, SLABS slabs at a time; SHARED planes have one scale."""
    m = tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    x_row = x + m.to(tl.int64)[:, None, None] * x_stride
    word_row = words + n.to(tl.int64)[None, :, None] * (slabs * 16)
    present = (n < n_size)[None, :, None]
    total = tl.zeros((M, N, SLABS), tl.float32)
    for first in range(0, slabs, SLABS):
        column = first * 16 + tl.arange(0, SLABS * 16)[None, None, :]
        word = tl.load(
            word_row + column, mask=present & (column < slabs * 16), other=0, eviction_policy="evict_first"
        )
        channel = (column // 16) * 128 + column % 16
        slab = first + tl.arange(0, SLABS)[None, None, :]
        for part in tl.static_range(8 // SHARED):
            low = tl.zeros((M, N, SLABS * 16), tl.float32)
            high = tl.zeros((M, N, SLABS * 16), tl.float32)
            low_sum = tl.zeros((M, 1, SLABS * 16), tl.float32)
            high_sum = tl.zeros((M, 1, SLABS * 16), tl.float32)
            for each in tl.static_range(SHARED):
                plane = part * SHARED + each
                k = channel + plane * 16
                if ORDERED:
                    k = tl.load(order + k, mask=column < slabs * 16, other=k_size)
                a = tl.load(x_row + k, mask=(m < rows)[:, None, None] & (k < k_size), other=0.0).to(
                    tl.float32
                )
                if plane < 4:
                    moved = word << (15 - 8 * (plane // 2))
                else:
                    moved = word >> (8 * (plane // 2) - 15)
                if plane % 2 == 0:
                    low += ((moved & 0x00078000) | one).to(tl.float32, bitcast=True) * a
                    low_sum += a
                else:
                    high += ((moved & 0x00780000) | one).to(tl.float32, bitcast=True) * a
                    high_sum += a
            codes = tl.sum(tl.reshape(low * 256.0 + high * 16.0, (M, N, SLABS, 16)), 3)
            surplus = tl.sum(tl.reshape(low_sum * 256.0 + high_sum * 16.0, (M, 1, SLABS, 16)), 3)
            plain = tl.sum(tl.reshape(low_sum + high_sum, (M, 1, SLABS, 16)), 3)
            at = n[None, :, None] * groups + (slab * 128 + part * SHARED * 16) // group
            known = present & (slab < slabs) & ((slab * 128 + part * SHARED * 16) // group < groups)
            middle = 8.0
            if HAS_ZERO:
                middle = tl.load(zero + at, mask=known, other=0).to(tl.float32)
            scales = tl.load(scale + at, mask=known, other=0.0).to(tl.float32)
            total += (codes - surplus - middle * plain) * scales
    finish(tl.sum(total, 2), x, x, bias, out, m[:, None], n[None], rows, n_size, 0, HAS)


@triton.jit
def tile_codes(
    x, order, words, scale, zero, bias, out, x_stride, rows, n_size, k_size, slabs, span, group, groups,
    M: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    HAS_ZERO: tl.constexpr, ORDERED: tl.constexpr, HAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile [M tokens, N channels] over ``span`` slabs, transposed as in ``tile``; SPLIT: ``out`` takes bare sums."""
    tiles = tl.cdiv(rows, M)
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    first = tl.program_id(1) * span
    j = tl.arange(0, 16)
    x_row = x + m.to(tl.int64)[:, None] * x_stride
    word_row = words + n.to(tl.int64)[:, None] * (slabs * 16) + j[None]
    total = tl.zeros((N, M), tl.float32)
    for slab in range(first, min(first + span, slabs)):
        word = tl.load(word_row + slab * 16, mask=(n < n_size)[:, None], other=0)
        for part in tl.static_range(8 // SHARED):
            at = (slab * 128 + part * SHARED * 16) // group
            known = (n < n_size) & (at < groups)
            middle = tl.full((N,), 8.0, tl.float32)
            if HAS_ZERO:
                middle = tl.load(zero + n * groups + at, mask=known, other=0).to(tl.float32)
            subtracted = (middle + OFFSET).to(x.dtype.element_ty)[:, None]
            product = tl.zeros((N, M), tl.float32)
            for each in tl.static_range(SHARED):
                plane = part * SHARED + each
                k = slab * 128 + plane * 16 + j
                if ORDERED:
                    k = tl.load(order + k)
                a = tl.load(x_row + k[None], mask=(m < rows)[:, None] & (k < k_size)[None], other=0.0)
                code = (word >> 4 * plane) & 15
                if BITS == 0:
                    w = code.to(x.dtype.element_ty) - subtracted
                else:
                    w = (code | BITS).to(tl.int16).to(x.dtype.element_ty, bitcast=True) - subtracted
                product = tl.dot(w, tl.trans(a), product, input_precision="ieee")
            scales = tl.load(scale + n * groups + at, mask=known, other=0.0).to(tl.float32)
            total += product * scales[:, None]
    if SPLIT:
        place = (tl.program_id(1).to(tl.int64) * rows + m[None]) * n_size + n[:, None]
        tl.store(out + place, total, mask=(m < rows)[None] & (n < n_size)[:, None])
    else:
        finish(total, x, x, bias, out, m[None], n[:, None], rows, n_size, 0, HAS)


@triton.jit
def dequantize_codes(
    order, words, scale, zero, out, n_size, k_size, slabs, group, groups,
    N: tl.constexpr, HAS_ZERO: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """A slab of N channels of the float weight out [n_size, k_size], its channels in their own order."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    slab = tl.program_id(1)
    j = tl.arange(0, 16)
    word = tl.load(
        words + (n.to(tl.int64)[:, None] * slabs + slab) * 16 + j[None], mask=(n < n_size)[:, None], other=0
    )
    out_row = out + n.to(tl.int64)[:, None] * k_size
    for plane in tl.static_range(8):
        place = slab * 128 + plane * 16
        known = (n < n_size) & (place // group < groups)
        middle = tl.full((N,), 8.0, tl.float32)
        if HAS_ZERO:
            middle = tl.load(zero + n * groups + place // group, mask=known, other=0).to(tl.float32)
        scales = tl.load(scale + n * groups + place // group, mask=known, other=0.0).to(tl.float32)
        value = (((word >> 4 * plane) & 15).to(tl.float32) - middle[:, None]) * scales[:, None]
        k = place + j
        if ORDERED:
            k = tl.load(order + k)
        inside = (n < n_size)[:, None] & (k < k_size)[None]
        tl.store(out_row + k[None], value.to(out.dtype.element_ty), mask=inside)


# -- launches --------------------------------------------------------------------------------------------


def layout(words: Tensor, scale: Tensor, order: Tensor | None, group_size: int) -> tuple[int, int, int]:
    """(slabs, channels of a group, planes that share a scale) of a packed weight."""
    slabs = words.shape[1] // PLANE
    group = group_size or slabs * SLAB
    if order is not None:
        group = len(order) // scale.shape[1]
    return slabs, group, math.gcd(group, SLAB) // PLANE


def gemv(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    """x [T <= 4, K] times the packed weight."""
    (rows, k), n = x.shape, words.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block = next_power_of_2(rows)
    config = GEMV[architecture(x.device)][block]
    channels, together = config.tile
    slabs, group, shared = layout(words, scale, order, group)
    gemv_codes[(triton.cdiv(n, channels),)](
        x, words if order is None else order, words, scale, words if zero is None else zero,
        x if bias is None else bias, out, x.stride(0), rows, n, k, slabs, group, scale.shape[1], ONE,
        M=block, N=channels, SLABS=min(together, next_power_of_2(slabs)), SHARED=shared,
        HAS_ZERO=zero is not None, ORDERED=order is not None, HAS=has(None, bias),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def tile(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    """x [T, K] times the packed weight on the tensor cores."""
    (rows, k), n, arch = x.shape, words.shape[0], architecture(x.device)
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    config = config_of(TILES[arch], rows)
    tokens, channels = config.tile
    slabs, group, shared = layout(words, scale, order, group)
    programs = triton.cdiv(rows, tokens) * triton.cdiv(n, channels)
    span = triton.cdiv(slabs, splits_of(programs, slabs * SLAB, SLAB, arch))
    splits = triton.cdiv(slabs, span)
    sums = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device) if splits > 1 else out
    bits, offset = MAGIC[x.dtype]
    tile_codes[(programs, splits)](
        x, words if order is None else order, words, scale, words if zero is None else zero,
        x if bias is None else bias, sums, x.stride(0), rows, n, k, slabs, span, group, scale.shape[1],
        M=tokens, N=channels, SHARED=shared, BITS=bits, OFFSET=offset,
        HAS_ZERO=zero is not None, ORDERED=order is not None, HAS=has(None, bias), SPLIT=splits > 1,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        reduce_splits[(triton.cdiv(rows * n, REDUCED),)](
            sums, x, x, x if bias is None else bias, out, rows, n, splits,
            BLOCK=REDUCED, X=0, HAS=has(None, bias),
        )  # fmt: skip
    return out


def dequantized(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    """x [T, K] times the weight as floats, which exist during the call only: for many tokens."""
    n, k = words.shape[0], x.shape[1]
    slabs, group, _ = layout(words, scale, order, group)
    weight = torch.empty((n, k), dtype=x.dtype, device=x.device)
    dequantize_codes[(triton.cdiv(n, 64), slabs)](
        words if order is None else order, words, scale, words if zero is None else zero,
        weight, n, k, slabs, group, scale.shape[1],
        N=64, HAS_ZERO=zero is not None, ORDERED=order is not None, num_warps=4,
    )  # fmt: skip
    return F.linear(x, weight, bias)


# -- packing ---------------------------------------------------------------------------------------------


def pack(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Weights of ``linear_wna16`` in the layout above: words, scale and zero [N, G], and the order of channels."""
    bits, group = options["bits"], options.get("group_size", 0)
    scale, zero, g_idx = weights[SCALE], weights.get(ZERO), weights.get(G_IDX)
    columns = weights[WEIGHT].shape[1] * WORD // bits
    columns = min(columns, scale.shape[1] * group) if group else columns
    if g_idx is None and group % PLANE:
        g_idx = torch.arange(columns, device=scale.device) // group
    codes = unpack_codes(weights[WEIGHT], bits, columns if g_idx is None else len(g_idx))
    if zero is None:
        codes += MIDDLE - (1 << (bits - 1))
    packed: dict[int, Tensor] = {}
    if g_idx is not None:
        order, group, source = in_planes(g_idx, scale.shape[1])
        scale, zero = scale[:, source], None if zero is None else zero[:, source]
        value_zero = torch.full_like(scale, MIDDLE, dtype=torch.uint8) if zero is None else zero
        held = codes[:, order.clamp_max(codes.shape[1] - 1)]
        codes = torch.where(order < codes.shape[1], held, value_zero.repeat_interleave(group, 1))
        packed[G_IDX] = order.to(torch.int32)
    packed |= {WEIGHT: words_of_planes(F.pad(codes, (0, -codes.shape[1] % SLAB))), SCALE: scale.contiguous()}
    return packed if zero is None else packed | {ZERO: zero.contiguous()}


def in_planes(g_idx: Tensor, groups: int) -> tuple[Tensor, int, Tensor]:
    """Channels sorted by group, each group from a new plane on, in whole slabs.

    The results: the channel of each place, or K for none; the number of places with one scale, a divisor or a
    multiple of a slab; and the group of each scale.
    """
    counts = torch.bincount(g_idx.long(), minlength=groups)
    places = (counts + PLANE - 1) // PLANE * PLANE
    shared = math.gcd(*places.tolist())
    shared = shared if shared % SLAB == 0 else math.gcd(shared, SLAB)
    total = -(-int(places.sum()) // SLAB) * SLAB
    by_group = g_idx.argsort(stable=True)
    owner = g_idx.long()[by_group]
    rank = torch.arange(len(g_idx), device=g_idx.device) - (counts.cumsum(0) - counts)[owner]
    order = torch.full((total,), len(g_idx), device=g_idx.device)
    order[(places.cumsum(0) - places)[owner] + rank] = by_group
    source = torch.arange(groups, device=g_idx.device).repeat_interleave(places // shared)
    return order, shared, F.pad(source, (0, total // shared - len(source)))


def words_of_planes(codes: Tensor) -> Tensor:
    """Codes [N, slabs * 128] as int32 [N, slabs * 16]."""
    planes = codes.unflatten(1, (-1, PLANES, PLANE))
    words = planes[:, :, 0].to(torch.int32)
    for plane in range(1, PLANES):
        words |= planes[:, :, plane].to(torch.int32) << 4 * plane
    return words.flatten(1)

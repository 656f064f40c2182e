"""RoPE of q and k and the write of K and V into the paged cache, in one launch.

A program takes a token and a few heads: of q, or of K and V. Each value is read once; for an int8 or E4M3 pool the
row's scale is computed on the way. Quantized pools are planar (``reference_attention``): values and scales of a block
are written to their planes.

E4M3 is encoded by integer arithmetic, which every GPU has, to the bits of torch's conversion.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels.kernel import Kernel
from optkit.kernels.reference_attention import KV_CODES, kv_planes
from optkit.kernels.triton.common import next_power_of_2, supports

FLOAT, INT8, FP8 = 0, 1, 2  # the constexpr FORMAT of a pool
FORMATS = {torch.int8: INT8, torch.uint8: FP8}
HEADS = 8  # of a program
WARPS = 2


@triton.jit
def e4m3_bytes(x):
    """float32 within +-464 as E4M3 bytes, to the nearest, ties to even; NaN becomes E4M3's."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    even = magnitude.to(tl.int32, bitcast=True)
    even += 0x7FFFF + (
        (even >> 20) & 1
    )  # half of the dropped bits, or just less where half would round to odd
    normal = (even >> 20) - (120 << 3)  # the exponent's bias is 127 in one and 7 in the other
    subnormal = (magnitude + 16384.0).to(
        tl.int32, bitcast=True
    ) & 0xF  # the last bit is 2^-9, E4M3's step here
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def row_scale(absmax, FORMAT: tl.constexpr):
    """The scale of rows with these largest magnitudes, equal to ``reference.quantize_kv``."""
    if FORMAT == 1:
        scale = tl.div_rn(absmax, 127.0)
    else:
        scale = tl.maximum(tl.div_rn(absmax, 448.0), 1.1754943508222875e-38)
    return scale


@triton.jit
def stored(x, absmax, like, FORMAT: tl.constexpr):
    """Rows x [R, C] in the type of pool ``like``. Adding 1.5 * 2^23 leaves the rounded integer in the low bits."""
    if FORMAT == 0:
        values = x.to(like.dtype.element_ty)
    elif FORMAT == 1:
        inverse = tl.where(absmax > 0, tl.div_rn(127.0, absmax), 0.0)
        values = ((x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(
            tl.int8, bitcast=False
        )
    else:
        values = e4m3_bytes(tl.div_rn(x, row_scale(absmax, FORMAT)[:, None]))
    return values


@triton.jit
def largest(x):
    """The largest magnitude of each row of x [R, C]; infinity for a row with a NaN, so the scale marks the row."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def rotated(x, cos, sin, ROTARY: tl.constexpr, HALF: tl.constexpr, i, inside):
    """The two halves of the first ROTARY channels at the pointers x [R, 1], rotated and rounded to their type."""
    h: tl.constexpr = ROTARY // 2
    low = tl.load(x + i, mask=inside, other=0.0)
    high = tl.load(x + h + i, mask=inside, other=0.0)
    known = i < h
    cos_low = tl.load(cos + i, mask=known, other=0.0)
    cos_high = tl.load(cos + h + i, mask=known, other=0.0)
    sin_low = tl.load(sin + i, mask=known, other=0.0)
    sin_high = tl.load(sin + h + i, mask=known, other=0.0)
    first, second = low.to(tl.float32), high.to(tl.float32)
    new_low = (first * cos_low - second * sin_low).to(low.dtype)
    new_high = (second * cos_high + first * sin_high).to(high.dtype)
    return new_low, new_high


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kv_heads(
    q, k, v, cos, sin, q_out, k_out, k_cache, v_cache, k_scales, v_scales, slots,
    q_token, q_head, k_token, k_head, v_token, v_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, FORMAT: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, V_COLUMNS: tl.constexpr,
):  # fmt: skip
    """R heads of a token: of q in the first programs of axis 1, of K and V in the rest.

    K_BLOCK, V_BLOCK, K_SCALES and V_SCALES are the elements from a block to the next in pools and scales.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (Q_HEADS + R - 1) // R
    cos += token * ROTARY
    sin += token * ROTARY
    i = tl.arange(0, HALF)[None, :]
    r = tl.arange(0, REST)[None, :]
    if part < q_parts:
        head = part * R + tl.arange(0, R)
        known = (head < Q_HEADS)[:, None]
        x = q + token * q_token + head[:, None] * q_head
        to = q_out + token * Q_HEADS * DIM + head[:, None] * DIM
        pair = known & (i < ROTARY // 2)
        low, high = rotated(x, cos, sin, ROTARY, HALF, i, pair)
        tl.store(to + i, low, mask=pair)
        tl.store(to + ROTARY // 2 + i, high, mask=pair)
        if ROTARY < DIM:
            rest = known & (r < DIM - ROTARY)
            tl.store(to + ROTARY + r, tl.load(x + ROTARY + r, mask=rest), mask=rest)
        return
    head = (part - q_parts) * R + tl.arange(0, R)
    exists = head < KV_HEADS
    known = exists[:, None]
    slot = tl.load(slots + token)
    kept = slot >= 0
    block = slot // BLOCK_SIZE
    at = (slot % BLOCK_SIZE) * KV_HEADS + head  # [R], of the block's rows

    x = k + token * k_token + head[:, None] * k_head
    to = k_cache + block * K_BLOCK + at[:, None] * DIM
    rest = known & (r < DIM - ROTARY)
    absmax = tl.zeros((R,), tl.float32)
    if ROTARY < DIM:
        others = tl.load(x + ROTARY + r, mask=rest, other=0.0)
        if FORMAT:
            absmax = largest(others.to(tl.float32))
    if ROTARY:
        pair = known & (i < ROTARY // 2)
        low, high = rotated(x, cos, sin, ROTARY, HALF, i, pair)
        out = k_out + token * KV_HEADS * DIM + head[:, None] * DIM
        tl.store(out + i, low, mask=pair)
        tl.store(out + ROTARY // 2 + i, high, mask=pair)
        if ROTARY < DIM:
            tl.store(out + ROTARY + r, others, mask=rest)
        first, second = low.to(tl.float32), high.to(tl.float32)
        if FORMAT:
            absmax = tl.maximum(absmax, tl.maximum(largest(first), largest(second)))
        tl.store(to + i, stored(first, absmax, k_cache, FORMAT), mask=pair & kept)
        tl.store(to + ROTARY // 2 + i, stored(second, absmax, k_cache, FORMAT), mask=pair & kept)
    if ROTARY < DIM:
        tl.store(to + ROTARY + r, stored(others.to(tl.float32), absmax, k_cache, FORMAT), mask=rest & kept)
    if FORMAT:
        tl.store(k_scales + block * K_SCALES + at, row_scale(absmax, FORMAT), mask=exists & kept)

    c = tl.arange(0, V_COLUMNS)[None, :]
    inside = known & (c < V_DIM)
    values = tl.load(v + token * v_token + head[:, None] * v_head + c, mask=inside, other=0.0).to(tl.float32)
    absmax = largest(values)
    to = v_cache + block * V_BLOCK + at[:, None] * V_DIM
    tl.store(to + c, stored(values, absmax, v_cache, FORMAT), mask=inside & kept)
    if FORMAT:
        tl.store(v_scales + block * V_SCALES + at, row_scale(absmax, FORMAT), mask=exists & kept)


def planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of a pool; for a float pool, whose scales nothing reads, the pool stands for both."""
    return kv_planes(cache) if cache.dtype in KV_CODES else (cache, cache)


def launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """``rope_kv_write``; without q and a table, only the write."""
    k, v = with_unit_stride(k), with_unit_stride(v)
    q = k[:, :0] if q is None else with_unit_stride(q)
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1:]
    (k_values, k_scales), (v_values, v_scales) = planes(k_cache), planes(v_cache)
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    k_out = k if cos is None else torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    cos, sin = (k, k) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    rotary = 0 if cos is k else cos.shape[1]
    group = min(HEADS, next_power_of_2(max(heads, kv_heads)))
    if tokens:
        grid = (tokens, triton.cdiv(heads, group) + triton.cdiv(kv_heads, group))
        rope_kv_heads[grid](
            q, k, v, cos, sin, q_out, k_out, k_values, v_values, k_scales, v_scales, slot_mapping,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, ROTARY=rotary,
            BLOCK_SIZE=k_cache.shape[1], K_BLOCK=k_values.stride(0), V_BLOCK=v_values.stride(0),
            K_SCALES=k_scales.stride(0), V_SCALES=v_scales.stride(0), FORMAT=FORMATS.get(k_cache.dtype, FLOAT),
            R=group, HALF=next_power_of_2(rotary // 2), REST=next_power_of_2(dim - rotary),
            V_COLUMNS=next_power_of_2(v_dim), num_warps=WARPS,
        )  # fmt: skip
    return q_out, k_out


def with_unit_stride(x: Tensor) -> Tensor:
    """x with neighbouring elements in its last dimension; a view of a fused projection passes unchanged."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``reference.rope_kv_write``."""
    return launch(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    launch(None, k, v, None, None, k_cache, v_cache, slot_mapping)


KERNELS = (Kernel("rope_kv_write", "triton", rope_kv_write, supports),)

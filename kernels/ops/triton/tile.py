"""Linear layers of quantized weights on the tensor cores, for any number of tokens.

The tile is transposed: the tensor cores' rows are output channels and their columns tokens, so 16 tokens are a full
instruction on Hopper too, whose instructions take 64 rows at least. Both operands lie along K in memory, as 8-bit
instructions require.

    activations   weights            product
    uint8         int8               int8, exact in int32 within a group
    E4M3          E4M3               E4M3, sums of K in float32, promoted from the tensor core's 14 bits at each tile
    float         int8, uint8, E4M3  in the type of the activations, which holds every 8-bit weight

Few tokens and few channels do not fill a GPU: then K is split over programs, each writes its sums, and a second
kernel adds them in order. There are no atomic additions, so a launch repeated gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels.triton.common import Config, architecture, next_power_of_2
from optkit.kernels.triton.gemv import ACTIVATIONS, FLOAT, U8, finish, has

PROCESSORS = {"sm_80": 108, "sm_90": 132}
MAX_SPLITS = 8
REDUCED = 1024  # sums that a program of ``reduce_splits`` finishes

# (tokens, channels, K) of a tile by the most tokens it is for. K is no more than a group.
CONFIGS: dict[str, dict[int, Config]] = {
    "sm_80": {
        16: Config((16, 64, 128), 4, 4), 32: Config((32, 64, 128), 4, 4), 64: Config((64, 64, 128), 4, 3),
        1 << 30: Config((128, 128, 64), 8, 3),
    },
    "sm_90": {
        16: Config((16, 64, 128), 4, 5), 32: Config((32, 64, 128), 4, 4), 64: Config((64, 64, 128), 4, 4),
        1 << 30: Config((128, 128, 128), 8, 3),
    },
}  # fmt: skip


@triton.jit
def tile_product(
    x, weight, x_scale, weight_scale, zero, bias, out, x_stride, rows, n_size, k_size, k_span, group, groups,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, X: tl.constexpr, HAS: tl.constexpr,
    ZERO: tl.constexpr, GROUPED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile [M tokens, N channels] over ``k_span`` of K.

    GROUPED: scales are [.., groups], of ``group`` channels, a multiple of K. SPLIT: ``out`` takes bare sums [splits,
    rows, n_size]. ZERO: a weight is its code less ``zero`` [n_size, groups].
    """
    tiles = tl.cdiv(rows, M)  # neighbours share weights
    m = (tl.program_id(0) % tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) // tiles) * N + tl.arange(0, N)
    first = tl.program_id(1) * k_span
    weight_row = weight + n.to(tl.int64)[:, None] * k_size
    x_row = x + m.to(tl.int64)[:, None] * x_stride
    if X == 1 and not GROUPED:
        total = tl.zeros((N, M), tl.int32)
    else:
        total = tl.zeros((N, M), tl.float32)
    for start in range(first, min(first + k_span, k_size), K):
        k = start + tl.arange(0, K)
        w = tl.load(weight_row + k[None], mask=(n < n_size)[:, None] & (k < k_size)[None], other=0.0)
        a = tl.load(x_row + k[None], mask=(m < rows)[:, None] & (k < k_size)[None], other=0.0)
        part = start // group
        if ZERO:
            zeros = tl.load(zero + n * groups + part, mask=n < n_size, other=0)
            w = (w.to(tl.float32) - zeros.to(tl.float32)[:, None]).to(a.dtype)
        elif X == 0:
            w = w.to(a.dtype)
        elif X == 1:
            a = (a ^ 128).to(tl.int8, bitcast=True)
        if GROUPED:
            if X == 1:
                product = tl.dot(w, tl.trans(a), out_dtype=tl.int32).to(tl.float32)
                product *= tl.load(x_scale + m * groups + part, mask=m < rows, other=0.0)[None]
            else:
                product = tl.dot(w, tl.trans(a), input_precision="ieee")
            scales = tl.load(weight_scale + n * groups + part, mask=n < n_size, other=0.0)
            total += product * scales.to(tl.float32)[:, None]
        elif X == 1:
            total = tl.dot(w, tl.trans(a), total, out_dtype=tl.int32)
        elif X == 2:
            total = tl.dot(w, tl.trans(a), total, max_num_imprecise_acc=K)
        else:
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    if SPLIT:
        at = (tl.program_id(1).to(tl.int64) * rows + m[None]) * n_size + n[:, None]
        tl.store(out + at, total, mask=(m < rows)[None] & (n < n_size)[:, None])
    elif GROUPED:
        finish(total, x_scale, weight_scale, bias, out, m[None], n[:, None], rows, n_size, 0, HAS & 2)
    else:
        sums = total.to(tl.float32)
        finish(sums, x_scale, weight_scale, bias, out, m[None], n[:, None], rows, n_size, X, HAS)


@triton.jit
def reduce_splits(
    sums, x_scale, weight_scale, bias, out, rows, n_size, splits,
    BLOCK: tl.constexpr, X: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    """sums [splits, rows, n_size], added in order and finished."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * n_size
    total = tl.load(sums + at, mask=inside, other=0)
    part = at
    for _ in range(1, splits):
        part += rows * n_size
        total += tl.load(sums + part, mask=inside, other=0)
    m = tl.where(inside, at // n_size, rows)
    finish(total.to(tl.float32), x_scale, weight_scale, bias, out, m, at % n_size, rows, n_size, X, HAS)


def splits_of(programs: int, k: int, tile_k: int, arch: str) -> int:
    """Into how many parts K goes: as many as fill the GPU twice, each of four tiles at least."""
    wanted = 2 * PROCESSORS[arch] // programs
    return max(1, min(MAX_SPLITS, wanted, k // (4 * tile_k)))


def config_of(configs: dict[int, Config], rows: int) -> Config:
    return next(config for most, config in configs.items() if rows <= most)


def tile(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    zero: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """x [T, K] times weight [N, K], of ``dtype``; the table above lists the types.

    Scales are [T, 1] and [N, 1], or [T, G] and [N, G] for groups of ``group`` channels (a multiple of 16, of 32 where
    activations are 8-bit); float activations have none. ``zero`` [N, G] belongs to uint8 weights.
    """
    (rows, k), n, arch = x.shape, weight.shape[0], architecture(x.device)
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if not rows:
        return out
    config = config_of(CONFIGS[arch], rows)
    tokens, channels, depth = config.tile
    depth = min(depth, group & -group or next_power_of_2(k))  # a tile lies within a group
    depth = max(depth, 16 if x.element_size() > 1 else 32)
    programs = triton.cdiv(rows, tokens) * triton.cdiv(n, channels)
    splits = splits_of(programs, k, depth, arch)
    span = triton.cdiv(triton.cdiv(k, splits), depth) * depth
    splits, kind = triton.cdiv(k, span), ACTIVATIONS.get(x.dtype, FLOAT)
    sums = out
    if splits > 1:
        exact = kind == U8 and not group
        sums = torch.empty((splits, rows, n), dtype=torch.int32 if exact else torch.float32, device=x.device)
    x_scale, weight_scale_, bias_ = (x if t is None else t for t in (x_scale, weight_scale, bias))
    tile_product[(programs, splits)](
        x, weight, x_scale, weight_scale_, x if zero is None else zero, bias_, sums, x.stride(0), rows, n, k, span,
        group or k, 1 if weight_scale is None else weight_scale.shape[1],
        M=tokens, N=channels, K=depth, X=kind, HAS=has(weight_scale, bias),
        ZERO=zero is not None, GROUPED=group > 0, SPLIT=splits > 1,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        reduce_splits[(triton.cdiv(rows * n, REDUCED),)](
            sums, x_scale, weight_scale_, bias_, out, rows, n, splits,
            BLOCK=REDUCED, X=FLOAT if group else kind, HAS=has(None if group else weight_scale, bias),
        )  # fmt: skip
    return out

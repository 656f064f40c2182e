"""Linear layers for one to four tokens: the weight is read once, and the read takes nearly all of the time.

A program owns a few output channels and runs over all of K: no partial sums cross programs, so the order of
additions, and with the order every bit, is the same in each launch. A thread loads 16 bytes of a weight row at a time
and multiplies the values with every token's activations in float32, or in int32, which is exact, where both are
integers. Tensor cores would not help: the arithmetic is a few instructions for each byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels.triton.common import Config, architecture, next_power_of_2

MAX_ROWS = 4
FLOAT, U8, E4M3 = 0, 1, 2  # what activations are: the constexpr X
ACTIVATIONS = {torch.uint8: U8, torch.float8_e4m3fn: E4M3}
SCALE, BIAS = 1, 2  # bits of the constexpr HAS

# Output channels and K of a program, by (bytes of a weight, tokens); 16 bytes a thread and channel.
CONFIGS: dict[str, dict[tuple[int, int], Config]] = {
    "sm_80": {
        (1, 1): Config((4, 1024), 2), (1, 2): Config((4, 1024), 2), (1, 4): Config((2, 1024), 2),
        (2, 1): Config((4, 1024), 4), (2, 2): Config((4, 1024), 4), (2, 4): Config((4, 512), 2),
        (4, 1): Config((4, 512), 4), (4, 2): Config((4, 512), 4), (4, 4): Config((4, 512), 4),
    },
    "sm_90": {
        (1, 1): Config((4, 2048), 4), (1, 2): Config((2, 2048), 4), (1, 4): Config((2, 1024), 2),
        (2, 1): Config((4, 1024), 4), (2, 2): Config((4, 1024), 4), (2, 4): Config((4, 512), 2),
        (4, 1): Config((4, 512), 4), (4, 2): Config((4, 512), 4), (4, 4): Config((4, 512), 4),
    },
}  # fmt: skip


@triton.jit
def gemv_rows(
    x, weight, x_scale, weight_scale, bias, out, x_stride, rows, n_size, k_size,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, X: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    """out [rows, n_size] of x [rows, k_size] and weight [n_size, k_size]; M >= rows, N channels a program."""
    m = tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    # Three dimensions from the start: a tile that gets its third later is moved between threads, through shared memory.
    weight_row = weight + n.to(tl.int64)[None, :, None] * k_size
    x_row = x + m.to(tl.int64)[:, None, None] * x_stride
    if X == 1:
        accumulator = tl.zeros((M, N, K), tl.int32)
    else:
        accumulator = tl.zeros((M, N, K), tl.float32)
    for start in range(0, k_size, K):
        k = start + tl.arange(0, K)[None, None, :]
        inside = k < k_size
        w = tl.load(
            weight_row + k,
            mask=(n < n_size)[None, :, None] & inside,
            other=0.0,
            eviction_policy="evict_first",
        )
        a = tl.load(x_row + k, mask=(m < rows)[:, None, None] & inside, other=0.0)
        if X == 1:
            accumulator += w.to(tl.int32) * (a.to(tl.int32) - 128)
        else:
            accumulator += w.to(tl.float32) * a.to(tl.float32)
    total = tl.sum(accumulator, 2).to(tl.float32)  # [M, N]
    finish(total, x_scale, weight_scale, bias, out, m[:, None], n[None], rows, n_size, X, HAS)


@triton.jit
def finish(total, x_scale, weight_scale, bias, out, m, n, rows, n_size, X: tl.constexpr, HAS: tl.constexpr):
    """Scales, bias and type: float32 sums of tokens m and channels n (which broadcast) go to out [rows, n_size]."""
    if X != 0:
        total *= tl.load(x_scale + m, mask=m < rows, other=0.0)
    if HAS & 1:
        total *= tl.load(weight_scale + n, mask=n < n_size, other=0.0).to(tl.float32)
    if HAS & 2:
        total += tl.load(bias + n, mask=n < n_size, other=0.0).to(tl.float32)
    at = m.to(tl.int64) * n_size + n
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows) & (n < n_size))


def gemv(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x [T <= 4, K] times weight [N, K], of ``dtype``, scaled by x_scale [T, 1] and weight_scale [N, 1] if given."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if not rows:
        return out
    block = next_power_of_2(rows)
    config = CONFIGS[architecture(x.device)][weight.element_size(), block]
    channels, columns = config.tile
    gemv_rows[(triton.cdiv(n, channels),)](
        x, weight, x if x_scale is None else x_scale, x if weight_scale is None else weight_scale,
        x if bias is None else bias, out, x.stride(0), rows, n, k,
        M=block, N=channels, K=min(columns, next_power_of_2(k)), X=ACTIVATIONS.get(x.dtype, FLOAT),
        HAS=has(weight_scale, bias), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def has(weight_scale: Tensor | None, bias: Tensor | None) -> int:
    """The bits of HAS."""
    return (SCALE if weight_scale is not None else 0) | (BIAS if bias is not None else 0)

"""Dynamic quantization of activations: int8 with a scale for each token or group, E4M3 with a scale for each token.

Codes of int8 are the reference's to the bit: the product is rounded to float32 before the rounding to an integer, so
no multiply-add is fused here. ``codes`` is also the last step of the fused norms and gates (``pointwise``). A program
holds whole rows in registers, so each value is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.kernel import Kernel
from optkit.kernels.triton.common import (
    MAX_COLUMNS,
    next_power_of_2,
    row_warps,
    rows_of,
    supports,
    supports_fp8,
)

NONE, INT8, FP8 = 0, 1, 2  # the constexpr FORMAT
FORMATS = {"int8": INT8, "fp8": FP8}
CODES = {INT8: torch.uint8, FP8: torch.float8_e4m3fn}
TILE = 4096  # values that a program quantizes at once, where rows are shorter


@triton.jit
def codes(x, FORMAT: tl.constexpr):
    """(codes, scale [R]) of float32 rows x [R, C].

    A NaN counts as infinity: the scale marks the row as lost. Adding 1.5 * 2^23 rounds to the nearest integer, ties
    to even, and leaves the integer in the lowest bits; 128 more makes the unsigned code.
    """
    absmax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    if FORMAT == 1:
        inverse = tl.where(absmax > 0, tl.div_rn(127.0, absmax), 0.0)
        shifted = x * inverse[:, None] + 12583040.0
        q = (shifted.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
        scale = tl.div_rn(absmax, 127.0)
    else:
        scale = tl.maximum(tl.div_rn(absmax, 448.0), 1.1754943508222875e-38)
        inverse = tl.div_rn(1.0, scale)
        q = tl.minimum(tl.maximum(x * inverse[:, None], -448.0), 448.0).to(tl.float8e4nv)
    return q, scale


@triton.jit
def quantize_rows(x, q, scale, rows, columns, R: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr):
    """q [rows, columns] and scale [rows] of x; R rows a program."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None]
    at = row[:, None] * columns + column[None]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    quantized, scales = codes(values, FORMAT)
    tl.store(q + at, quantized, mask=inside)
    tl.store(scale + row, scales, mask=row < rows)


def run(x: Tensor, width: int, fmt: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [T, K], each ``width`` consecutive channels with a scale."""
    x = rows_of(x).contiguous()
    q = torch.empty(x.shape, dtype=CODES[fmt], device=x.device)
    scale = torch.empty((x.shape[0], x.shape[1] // width), dtype=torch.float32, device=x.device)
    rows, block = scale.numel(), next_power_of_2(width)
    together = max(1, TILE // block)
    if rows:
        quantize_rows[(triton.cdiv(rows, together),)](
            x, q, scale, rows, width, R=together, C=block, FORMAT=fmt,
            num_warps=row_warps(together * block), enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


def quantize_per_token(x: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """See ``reference.quantize_per_token``."""
    width = group_size or x.shape[1]
    return reference.quantize_per_token(x, group_size) if width > MAX_COLUMNS else run(x, width, INT8)


def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.quantize_fp8_per_token``."""
    return reference.quantize_fp8_per_token(x) if x.shape[1] > MAX_COLUMNS else run(x, x.shape[1], FP8)


KERNELS = (
    Kernel("quantize_per_token", "triton", quantize_per_token, supports),
    Kernel("quantize_fp8_per_token", "triton", quantize_fp8_per_token, supports_fp8, needs="Hopper"),
)

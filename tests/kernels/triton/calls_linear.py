"""Launches of linear layers at a 7B model's shapes, for ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.triton import gemv, pointwise, tile, wna16

N, K = 4096, 11008
BF16, F32, U8, I8, E4M3 = torch.bfloat16, torch.float32, torch.uint8, torch.int8, torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int8_calls(rows: tuple[int, ...] = (1, 2, 4, 16, 128)) -> Iterator[Callable[[], Any]]:
    weight, scale = meta(N, K, dtype=I8), meta(N, 1, dtype=F32)
    for m in rows:
        x, q, s = meta(m, K), meta(m, K, dtype=U8), meta(m, 1, dtype=F32)
        if m <= gemv.MAX_ROWS:
            yield partial(gemv.gemv, q, weight, s, scale, None, BF16)
            yield partial(gemv.gemv, x, weight, None, scale, None, BF16)
            yield partial(gemv.gemv, x, meta(N, K), None, None, None, BF16)
        else:
            yield partial(tile.tile, q, weight, s, scale, None, BF16)
            yield partial(tile.tile, x, weight, None, scale, None, BF16)
            groups, zero = meta(N, K // 64, dtype=F32), meta(N, K // 64, dtype=U8)
            yield partial(tile.tile, q, weight, meta(m, K // 64, dtype=F32), groups, None, BF16, None, 64)
            yield partial(tile.tile, x, weight.to(U8), None, groups, None, BF16, zero, 64)


def fp8_calls(rows: tuple[int, ...] = (1, 2, 4, 16, 32, 64)) -> Iterator[Callable[[], Any]]:
    weight, scale = meta(N, K, dtype=E4M3), meta(N, 1, dtype=F32)
    for m in rows:
        q, s = meta(m, K, dtype=E4M3), meta(m, 1, dtype=F32)
        run = gemv.gemv if m <= gemv.MAX_ROWS else tile.tile
        yield partial(run, q, weight, s, scale, None, BF16)
        yield partial(run, meta(m, K), weight, None, scale, None, BF16)


def codes_calls(
    rows: tuple[int, ...] = (1, 2, 4, 16, 32, 64), groups: tuple[int, ...] = (32, 128)
) -> Iterator[Callable[[], Any]]:
    slabs = K // wna16.SLAB
    words = meta(N, slabs * wna16.PLANE, dtype=torch.int32)
    for group in groups:
        scale, zero = meta(N, K // group, dtype=torch.float16), meta(N, K // group, dtype=U8)
        for m in rows:
            run = wna16.gemv if m <= gemv.MAX_ROWS else wna16.tile
            yield partial(run, meta(m, K), words, scale, zero if group == 128 else None, None, None, group)
        yield partial(wna16.dequantized, meta(256, K), words, scale, zero, None, None, group)


def essential_calls() -> Iterator[Callable[[], Any]]:
    """One of each kind, as a 7B model decodes with: what is compiled in every test run."""
    weight = meta(N, K, dtype=E4M3)
    for m, run in ((1, gemv.gemv), (16, tile.tile)):
        yield partial(
            run, meta(m, K, dtype=E4M3), weight, meta(m, 1, dtype=F32), meta(N, 1, dtype=F32), None, BF16
        )
    yield from codes_calls((1, 16), (128,))
    q, scale = meta(16, K, dtype=U8), meta(16, 1, dtype=F32)
    yield partial(tile.tile, q, meta(N, K, dtype=I8), scale, meta(N, 1, dtype=F32), None, BF16)
    yield partial(pointwise.add_rms_norm_quantize, meta(8, N), meta(8, N), meta(N), 1e-5, 0.0, "fp8")
    yield partial(pointwise.silu_mul_quantize, meta(8, 2 * K), "fp8")

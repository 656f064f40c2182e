"""Launches of attention and the cache write at the shapes of 7B and 8B models, for ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from optkit.kernels.triton import attention, rope_kv

SIZE, BLOCKS = 16, 4096
HEADS = ((32, 32), (32, 8))
POOLS = (torch.bfloat16, torch.int8, torch.uint8)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pools(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    row = dim if dtype.is_floating_point else dim + 4
    pool = meta(BLOCKS, SIZE, kv_heads, row, dtype=dtype)
    return pool, pool


def attend(
    heads: int, kv_heads: int, tokens: int, sequences: int, length: int, pool: torch.dtype = torch.bfloat16,
    dim: int = 128, dtype: torch.dtype = torch.bfloat16, window: int = 0, softcap: float = 0.0,
) -> Callable[[], Any]:  # fmt: skip
    kv = meta(tokens, kv_heads, dim, dtype=dtype)
    return partial(
        attention.paged_attention, meta(tokens, heads, dim, dtype=dtype), kv, kv, *pools(kv_heads, dim, pool),
        meta(sequences + 1, dtype=torch.int32), meta(sequences, dtype=torch.int32),
        meta(sequences, length // SIZE, dtype=torch.int32), scale=dim**-0.5, window=window, softcap=softcap,
    )  # fmt: skip


def write(
    heads: int, kv_heads: int, pool: torch.dtype, dim: int = 128, rotary: int = 128
) -> Callable[[], Any]:
    kv, table = meta(8, kv_heads, dim), meta(8, rotary, dtype=torch.float32)
    slots = meta(8, dtype=torch.int64)
    q = meta(8, heads, dim)
    return partial(rope_kv.rope_kv_write, q, kv, kv, table, table, *pools(kv_heads, dim, pool), slots)


def essential_calls() -> Iterator[Callable[[], Any]]:
    """What every model runs on."""
    yield attend(32, 8, 2048, 1, 2048)
    yield attend(32, 32, 1, 1, 2048, torch.uint8)
    yield write(32, 8, torch.int8)


def calls() -> Iterator[Callable[[], Any]]:
    """What the recipes' models run."""
    for heads, kv_heads in HEADS:
        for pool in POOLS:
            yield attend(heads, kv_heads, 2048, 1, 2048, pool)  # a prompt
            yield attend(heads, kv_heads, 1, 1, 2048, pool)  # decode, split
            yield attend(heads, kv_heads, 64, 64, 2048, pool)  # decode
            yield write(heads, kv_heads, pool)


def unusual_calls() -> Iterator[Callable[[], Any]]:
    """Other tiles, widths, masks and types."""
    yield attend(32, 8, 4, 1, 2048)
    yield attend(32, 8, 16, 1, 2048)
    yield attend(32, 8, 40, 8, 2048)
    yield attend(9, 3, 300, 1, 512, dim=64)
    yield attend(32, 32, 300, 1, 512, dim=96)
    yield attend(8, 4, 300, 1, 512, dim=256, window=512, softcap=50.0)
    yield attend(8, 4, 2, 2, 512, dim=256, window=512, softcap=50.0)
    yield attend(9, 3, 300, 1, 512, torch.float32, dim=64, dtype=torch.float32)
    yield attend(9, 3, 1, 1, 512, torch.float32, dim=64, dtype=torch.float32)
    yield attend(9, 9, 300, 1, 512, torch.float32, dim=128, dtype=torch.float32)
    yield attend(32, 8, 300, 1, 512, torch.int8, dtype=torch.float16)
    yield write(9, 3, torch.int8, dim=64, rotary=32)
    yield write(32, 8, torch.uint8, dim=80, rotary=80)

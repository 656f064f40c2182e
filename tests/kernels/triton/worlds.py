"""Ragged batches over scattered blocks of poisoned pools, and what attention over them is in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.kv_rows import KV_SCALE_BYTES
from optkit.kernels.reference_attention import KV_CODES, kv_planes, quantize_kv


@dataclass(frozen=True)
class Shape:
    """``new`` tokens for sequences whose cache holds ``old`` before; one of 0 is padding, as CUDA graphs need it."""

    new: tuple[int, ...]
    old: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    v_dim: int = 0  # 0: as dim
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    sinks: bool = False
    slopes: bool = False
    dtype: torch.dtype = torch.float32
    pool: torch.dtype = torch.float32
    seed: int = 0


def planar_write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """What the spec writes into a GPU's pool, wherever the pool lies."""
    kept = slots >= 0
    block, offset = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    if cache.dtype not in KV_CODES:
        cache[block, offset] = rows[kept].to(cache.dtype)
        return
    for plane, part in zip(
        kv_planes(cache), reference.kv_parts(quantize_kv(rows[kept], cache.dtype)), strict=True
    ):
        plane[block, offset] = part


def planar_read(cache: Tensor) -> Tensor:
    """A GPU's pool as float64 [blocks, block_size, Hkv, D]."""
    if cache.dtype not in KV_CODES:
        return cache.double()
    values, scales = kv_planes(cache)
    return values.view(KV_CODES[cache.dtype]).double() * scales[..., None]


def poisoned(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A pool that is full of NaN, or of bytes 0xff."""
    if dtype in KV_CODES:
        shape = (blocks, size, heads, dim + KV_SCALE_BYTES)
        return torch.full(shape, 255, dtype=torch.uint8).view(dtype)
    return torch.full((blocks, size, heads, dim), float("nan"), dtype=dtype)


class World:
    """The tensors of one call, on the default device, with the old tokens already in the pools."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scale = shape.dim**-0.5
        device = torch.get_default_device()
        with torch.device("cpu"):
            self.fill(torch.Generator().manual_seed(shape.seed))
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def fill(self, generator: torch.Generator) -> None:
        shape = self.shape
        v_dim, kv = shape.v_dim or shape.dim, shape.kv_heads
        lengths = [n + o if n else 0 for n, o in zip(shape.new, shape.old, strict=True)]
        counts = [max(n, 1) for n in shape.new]

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        widths = [shape.heads * shape.dim, kv * shape.dim, kv * v_dim, 8]
        q, k, v, _ = random(sum(counts), sum(widths)).split(widths, dim=1)  # views, as of a fused projection
        self.q = q.unflatten(1, (shape.heads, shape.dim)) * 2
        self.k, self.v = k.unflatten(1, (kv, shape.dim)), v.unflatten(1, (kv, v_dim))
        used = [-(-length // shape.size) for length in lengths]
        order = torch.randperm(sum(used) + 2, generator=generator)
        self.tables = torch.zeros(len(used), max(used) + 1, dtype=torch.int32)
        self.k_cache = poisoned(len(order), shape.size, kv, shape.dim, shape.pool)
        self.v_cache = poisoned(len(order), shape.size, kv, v_dim, shape.pool)
        slots = []
        for s, length in enumerate(lengths):
            self.tables[s, : used[s]] = order[sum(used[:s]) : sum(used[:s]) + used[s]]
            at = torch.arange(length)
            at = self.tables[s].long()[at // shape.size] * shape.size + at % shape.size
            old = shape.old[s] if length else 0
            planar_write(random(old, kv, shape.dim), self.k_cache, at[:old])
            planar_write(random(old, kv, v_dim), self.v_cache, at[:old])
            slots.append(at[old:] if length else torch.tensor([-1]))
        self.slots = torch.cat(slots)
        self.sinks = torch.randn(shape.heads, generator=generator) * 2 if shape.sinks else None
        self.slopes = torch.rand(shape.heads, generator=generator) if shape.slopes else None
        self.query_start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)

    def call(self, kernel: Any) -> Tensor:
        """The kernel on these tensors; it writes the new tokens to the pools."""
        return kernel(
            self.q, self.k, self.v, self.k_cache, self.v_cache, self.slots, self.query_start, self.seq_lens,
            self.tables, **self.options,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, Any]:
        shape = self.shape
        scores = {"scale": self.scale, "window": shape.window, "softcap": shape.softcap, "chunk": shape.chunk}
        return scores | {"sinks": self.sinks, "slopes": self.slopes}

    def expected(self) -> Tensor:
        """Attention over what the pools hold now, in float64."""
        k_cache, v_cache = planar_read(self.k_cache), planar_read(self.v_cache)
        starts, out = self.query_start.tolist(), []
        for s, length in enumerate(self.seq_lens.tolist()):
            q = self.q[starts[s] : starts[s + 1]].double()
            if not length:
                out.append(q.new_zeros(*q.shape[:2], self.v.shape[2]))
                continue
            keys, values = (reference.gather_kv(c, self.tables[s], length) for c in (k_cache, v_cache))
            out.append(reference.attend(q, keys, values, **self.options))
        return torch.cat(out)


def error(out: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number; NaN is infinite."""
    difference = (out.double() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(float("inf")))

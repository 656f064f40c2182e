"""Paged attention of a layer: whole prompts, decodes, chunks behind a prefix, and both in the same step, in scattered
blocks.

Published times are FlashAttention-3 on an H200, by vLLM 0.24 or SGLang 0.5.14, the faster of the two, with bfloat16
and heads of 128 (NVIDIA aiconfigurator, Apache-2.0, ``h200_sxm/attention``). Bytes are the visible keys and values,
once, plus queries and results. FLOPs are the pairs within the causal mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case, Inputs
from optkit.kernels import reference
from optkit.kernels.kv_rows import KV_SCALE_BYTES
from optkit.kernels.reference_attention import KV_CODES, kv_parts, kv_planes, quantize_kv
from optkit.kernels.triton.selection import Timing

BLOCK_SIZE = 16
TOLERANCE = 1e-2
PREFILL_US = {  # by (heads, KV heads): tokens of one prompt
    (32, 32): {128: 13.5, 256: 15.5, 512: 20, 1024: 43, 2048: 93, 4096: 280, 8192: 981},
    (32, 8): {128: 12, 256: 14, 512: 18, 1024: 29, 2048: 81, 4096: 266, 8192: 888},
    (40, 40): {128: 13.7, 256: 16, 512: 25, 1024: 54, 2048: 123, 4096: 368, 8192: 1209},
}
DECODE_US = {  # by (heads, KV heads, sequences): tokens of context
    (32, 32, 1): {128: 10.2, 512: 13.7, 1024: 13.7, 2048: 15.0, 4096: 28.5, 8192: 43, 16384: 76},
    (32, 32, 8): {128: 13.5, 512: 29, 1024: 44, 2048: 74, 4096: 135, 8192: 254, 16384: 499},
    (32, 32, 32): {128: 37, 512: 83, 1024: 145, 2048: 266, 4096: 510, 8192: 1005},
    (32, 8, 1): {128: 9, 512: 12, 1024: 12, 2048: 12, 4096: 14, 8192: 16, 16384: 28},
    (32, 8, 8): {128: 10, 512: 14, 1024: 15, 2048: 27, 4096: 42, 8192: 73, 16384: 132},
    (32, 8, 32): {128: 13, 512: 28, 1024: 43, 2048: 73, 4096: 131, 8192: 248, 16384: 484},
}
MAX_PREFILL, MAX_DECODE, GATED_PREFILL = 1.3, 1.1, (512, 1024, 2048)
POOLS = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": torch.uint8}


@dataclass(frozen=True)
class Step:
    """``new`` tokens of each sequence behind ``old`` cached tokens."""

    heads: int
    kv_heads: int
    new: tuple[int, ...]
    old: tuple[int, ...]
    stored: str = "bf16"
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def make(self, device: torch.device, generator: torch.Generator) -> Inputs:
        tokens, lengths = sum(self.new), [n + o for n, o in zip(self.new, self.old, strict=True)]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        q = random(tokens, self.heads, self.dim)
        k, v = random(tokens, self.kv_heads, self.dim), random(tokens, self.kv_heads, self.dim)
        used = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(used), generator=generator, device=device)
        tables = torch.zeros(len(used), max(used), dtype=torch.int32, device=device)
        for s, blocks in enumerate(order.split(used)):
            tables[s, : used[s]] = blocks
        rows = [random(sum(used) * BLOCK_SIZE, self.kv_heads, self.dim) for _ in range(2)]
        self.put(rows, (k, v), tables, lengths)
        caches = [pool(row, POOLS[self.stored]) for row in rows]
        starts = torch.tensor([0, *self.new], device=device).cumsum(0).to(torch.int32)
        ends = torch.tensor(lengths, dtype=torch.int32, device=device)
        return (q, k, v, *caches, starts, ends, tables, self.dim**-0.5)

    def put(self, rows: list[Tensor], new: tuple[Tensor, Tensor], tables: Tensor, lengths: list[int]) -> None:
        """Write the new tokens' K and V to their places among the pools' rows."""
        done = 0
        for s, (count, length) in enumerate(zip(self.new, lengths, strict=True)):
            at = torch.arange(length - count, length, device=tables.device)
            slots = tables[s].long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for pool_rows, values in zip(rows, new, strict=True):
                pool_rows[slots] = values[done : done + count]
            done += count

    @property
    def pairs(self) -> int:
        """Number of visible pairs of query and key, per head."""
        return sum(n * o + n * (n + 1) // 2 for n, o in zip(self.new, self.old, strict=True))

    @property
    def bytes(self) -> int:
        quantized = self.stored in ("int8", "fp8")
        row = self.dim + KV_SCALE_BYTES if quantized else 2 * self.dim
        keys = sum(self.new) + sum(self.old)
        return 2 * keys * self.kv_heads * row + 2 * sum(self.new) * self.heads * self.dim * 2

    def case(self, shape: str, kernel: str, us: float | None = None, most: float | None = None) -> Case:
        return Case(
            op="paged_attention",
            kernel=kernel,
            shape=f"{shape}, {self.heads}/{self.kv_heads} heads, d{self.dim}",
            dtype=self.stored,
            make=self.make,
            run=RUN[kernel],
            reference=exact,
            tolerance=TOLERANCE,
            bytes=self.bytes,
            flops=4 * self.pairs * self.heads * self.dim,
            published_us=us,
            most=most,
        )


def pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [blocks * block_size, Hkv, D] in the layout of a GPU's pool: planar if quantized."""
    if dtype not in KV_CODES:
        return rows.to(dtype).unflatten(0, (-1, BLOCK_SIZE))
    stored = quantize_kv(rows, dtype).unflatten(0, (-1, BLOCK_SIZE))
    cache = torch.empty_like(stored)
    for plane, part in zip(kv_planes(cache), kv_parts(stored), strict=True):
        plane.copy_(part)
    return cache


def wide(cache: Tensor) -> Tensor:
    """A GPU's pool in float64."""
    if cache.dtype not in KV_CODES:
        return cache.double()
    values, scales = kv_planes(cache)
    return values.view(KV_CODES[cache.dtype]).double() * scales[..., None]


def exact(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, ends: Tensor, tables: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The result in float64, for a sequence and a KV head at a time."""
    group, size, out = q.shape[1] // k.shape[1], k_cache.shape[1], q.new_empty(q.shape, dtype=torch.float64)
    first = starts.tolist()
    for s, length in enumerate(ends.tolist()):
        blocks = tables[s, : -(-length // size)].long()
        for h in range(k.shape[1]):
            queries = q[first[s] : first[s + 1], h * group : (h + 1) * group].double()
            keys, values = (wide(c[blocks]).flatten(0, 1)[:length, h : h + 1] for c in (k_cache, v_cache))
            result = reference.attend(queries, keys, values, scale, 0, 0.0)
            out[first[s] : first[s + 1], h * group : (h + 1) * group] = result
    return out


def by_triton(*inputs: Any) -> Tensor:
    from optkit.kernels.triton import attention

    return attention.paged_attention(*inputs[:-1], scale=inputs[-1])


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    from optkit.kernels.triton import sdpa

    return sdpa.dense(q, k, v, rest[-1])


RUN = {"triton": by_triton, "sdpa": by_sdpa}


def cases(tiny: bool = False) -> list[Case]:
    """All cases. ``tiny``: shapes for an interpreter, in float16."""
    return list(small() if tiny else [*prompts(), *decodes(), *others()])


def prompts() -> Iterator[Case]:
    for (heads, kv_heads), times in PREFILL_US.items():
        for tokens, us in times.items():
            step = Step(heads, kv_heads, (tokens,), (0,))
            most = MAX_PREFILL if tokens in GATED_PREFILL else None
            for kernel in RUN:
                yield step.case(f"prefill {tokens}", kernel, us, most if kernel == "triton" else None)


def decodes() -> Iterator[Case]:
    for (heads, kv_heads, sequences), times in DECODE_US.items():
        for context, us in times.items():
            step = Step(heads, kv_heads, (1,) * sequences, (context - 1,) * sequences)
            yield step.case(f"decode {context}, bs {sequences}", "triton", us, MAX_DECODE)


def others() -> Iterator[Case]:
    """Cases without published times: quantized pools, a chunk behind a prefix, chunk and decodes in the same step."""
    for stored in ("int8", "fp8"):
        for heads, kv_heads in ((32, 32), (32, 8)):
            prompt = Step(heads, kv_heads, (2048,), (0,), stored)
            yield prompt.case("prefill 2048", "triton")
            for sequences in (1, 32):
                step = Step(heads, kv_heads, (1,) * sequences, (4095,) * sequences, stored)
                yield step.case(f"decode 4096, bs {sequences}", "triton")
    yield Step(32, 8, (128,), (8064,)).case("chunk 128 behind 8064", "triton")
    yield Step(32, 8, (512, *(1,) * 31), (0, *(2047,) * 31)).case("prefill 512 and 31 decodes 2048", "triton")
    ragged = tuple(64 + 131 * i for i in range(32))
    yield Step(32, 8, (1,) * 32, ragged).case("decode 64 to 4125, bs 32", "triton")


def timing(case: Case, us: float) -> Timing | None:
    """The timing of a measured prompt for ``selection.measured``; None for all other cases."""
    found = re.fullmatch(r"prefill (\d+), (\d+)/(\d+) heads, d(\d+)", case.shape)
    if case.op != "paged_attention" or case.dtype != "bf16" or found is None:
        return None
    tokens, heads, kv_heads, dim = map(int, found.groups())
    return Timing(case.op, "16-bit", case.kernel, tokens, heads * dim, kv_heads * dim, us)


def small() -> Iterator[Case]:
    half = {"dim": 16, "dtype": torch.float16}
    yield Step(2, 1, (20,), (0,), "fp16", **half).case("prefill 20", "triton")
    yield Step(2, 1, (20,), (0,), "fp16", **half).case("prefill 20", "sdpa")
    for stored in ("fp16", "int8", "fp8"):
        yield Step(2, 2, (1, 1), (40, 3), stored, **half).case("decode 41, bs 2", "triton")

"""RoPE with the paged KV write at Llama-2-7B's and Llama-3-8B's heads: bound by launches for few tokens.

Rotated q and k and the final content of the pools are compared: values as numbers, and scales. A value on the border
of two codes may take either code; for E4M3 the difference is a fourteenth of the largest value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import Case, Inputs
from optkit.kernels import reference
from optkit.kernels.kv_rows import KV_SCALE_BYTES
from optkit.kernels.reference_attention import KV_CODES, kv_parts, kv_planes, quantize_kv

BLOCK_SIZE = 16
HEADS = ((32, 32), (32, 8))
TOKENS = (1, 8, 32, 512, 2048)
POOLS = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": torch.uint8}
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "int8": 1e-2, "fp8": 0.08}


def cases(tiny: bool = False) -> list[Case]:
    """All cases. ``tiny``: shapes for an interpreter, in float16."""
    if tiny:
        return [case(3, 4, 2, 16, stored, torch.float16) for stored in ("fp16", "int8", "fp8")]
    return [
        case(tokens, heads, kv_heads, 128, stored, torch.bfloat16)
        for heads, kv_heads in HEADS
        for stored in ("bf16", "int8", "fp8")
        for tokens in TOKENS
    ]


def case(tokens: int, heads: int, kv_heads: int, dim: int, stored: str, dtype: torch.dtype) -> Case:
    row = 2 * dim if stored in ("bf16", "fp16") else dim + KV_SCALE_BYTES

    def make(device: torch.device, generator: torch.Generator) -> Inputs:
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        fused = torch.randn(tokens, sum(widths), generator=generator, device=device).to(dtype)
        q, k, v = (x.unflatten(1, (-1, dim)) for x in fused.split(widths, dim=1))
        inv_freq = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
        cos, sin = reference.rope_table(torch.arange(100, 100 + tokens, device=device), inv_freq)
        blocks = -(-tokens // BLOCK_SIZE) + 1
        slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator, device=device)[:tokens]
        shape = (blocks, BLOCK_SIZE, kv_heads, dim if row == 2 * dim else row)
        caches = [torch.zeros(shape, dtype=POOLS[stored], device=device) for _ in range(2)]
        return (q, k, v, cos, sin, *caches, slots)

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        from optkit.kernels.triton import rope_kv

        return (*rope_kv.rope_kv_write(*inputs), *held(inputs[5]), *held(inputs[6]))

    def exact(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        k_cache, v_cache, slots = rest
        new_q, new_k = (reference.partial_rope(x.double(), cos.double(), sin.double()) for x in (q, k))
        pools = [torch.zeros_like(k_cache), torch.zeros_like(v_cache)]
        at = (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        for cache, rows in zip(pools, (new_k.to(dtype), v), strict=True):
            if cache.dtype in KV_CODES:
                for plane, part in zip(
                    kv_planes(cache), kv_parts(quantize_kv(rows, cache.dtype)), strict=True
                ):
                    plane[at] = part
            else:
                cache[at] = rows
        return (new_q, new_k, *held(pools[0]), *held(pools[1]))

    elements = tokens * dim * (heads + 2 * kv_heads)
    written = tokens * (heads + kv_heads) * dim * 2 + 2 * tokens * kv_heads * row
    return Case(
        op="rope_kv_write",
        kernel="triton",
        shape=f"{tokens} tokens, {heads}/{kv_heads} heads, d{dim}",
        dtype=stored,
        make=make,
        run=run,
        reference=exact,
        tolerance=TOLERANCE[stored],
        bytes=elements * 2 + written + 2 * tokens * dim * 4,
        flops=3 * tokens * dim * (heads + kv_heads),
    )


def held(cache: Tensor) -> tuple[Tensor, ...]:
    """The content of a GPU's pool: numbers, and scales if quantized."""
    if cache.dtype not in KV_CODES:
        return (cache,)
    values, scales = kv_planes(cache)
    return values.view(KV_CODES[cache.dtype]), scales

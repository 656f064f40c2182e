"""Attention of a whole prompt by the vendor's kernels: cuDNN's on Hopper, FlashAttention-2 elsewhere, through PyTorch.

A sequence whose tokens are all new needs no cache to attend, and dense kernels that NVIDIA wrote are hard to beat where
arithmetic bounds. Lengths are on the device, so the kernel cannot see whether this holds: whoever lowers a graph says
so, by the site option ``first_chunk`` (a step has one sequence, and all its tokens are new). Among steps for which it
was said, the table of measured times decides by the number of tokens (``selection``).

cuDNN makes a plan for each shape at its first call, which takes tens of milliseconds: such steps want few shapes, and a
warm-up. PyTorch's ``varlen_attn``, which would take several prompts, is FlashAttention-2 and was measured by others at
half of cuDNN's speed on Hopper; several prompts go to Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from optkit.kernels import Kernel
from optkit.kernels.triton import attention as tiles
from optkit.kernels.triton import common, selection
from optkit.kernels.triton.common import supports
from optkit.kernels.triton.rope_kv import write_kv

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MOST_DIM = 256  # of a head, for the first two


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """See ``reference.paged_attention``, for one sequence whose tokens are all new."""
    tokens, heads, dim = q.shape
    fits = q.dtype in (torch.float16, torch.bfloat16) and max(dim, v.shape[2]) <= MOST_DIM
    shape = (tokens, heads * dim, k.shape[1] * dim)
    able = {"sdpa": fits and tokens > 1, "triton": True}
    if selection.choose("paged_attention", "16-bit", shape, common.architecture(q.device), able) != "sdpa":
        return tiles.paged_attention(
            q, k, v, k_cache, v_cache, query_start, seq_lens, block_tables, scale, window, softcap
        )
    return dense(q, k, v, scale)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence: q [T, H, D], k [T, Hkv, D] and v [T, Hkv, Dv] give [T, H, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out[0].transpose(0, 1).contiguous()  # which cuDNN's result already is


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """See ``reference.attention``, for one sequence whose tokens are all new."""
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return paged_attention(
        q, k, v, k_cache, v_cache, query_start, seq_lens, block_tables, scale, window, softcap
    )


def first_chunk(options: Mapping[str, Any]) -> bool:
    """Whether a site says so, and the cache changes no numbers."""
    plain = not options.get("softcap") and not options.get("window")
    return bool(options.get("first_chunk")) and plain and options.get("kv_dtype") not in ("int8", "fp8")


KERNELS = (
    Kernel("attention", "sdpa", attention, supports, handles=first_chunk),
    Kernel("paged_attention", "sdpa", paged_attention, supports, handles=first_chunk),
)

"""Attention of a whole prompt by the vendor's kernels: cuDNN's on Hopper, FlashAttention-2 elsewhere, through
PyTorch.

A sequence of only new tokens attends without the cache, and NVIDIA's dense kernels are hard to beat where
arithmetic bounds. For a whole prompt (``optkit.kernels.whole_prompt``) the table of measured times decides by the
number of tokens (``selection``). Rows of padding stand behind the prompt, where the causal mask hides padding from
all rows of the prompt.

cuDNN makes a plan for each shape at its first call, in tens of milliseconds: captured graphs have few shapes and warm
up before the capture. PyTorch's ``varlen_attn``, which would take several prompts, is FlashAttention-2, measured
elsewhere at half of cuDNN's speed on Hopper; several prompts go to Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from optkit.kernels.triton import common, selection
from optkit.kernels.whole_prompt import current_whole_prompt

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MAX_HEAD_DIM = 256  # of a head, for the first two


def takes(q: Tensor, k: Tensor, v: Tensor, pool: torch.dtype, window: int) -> bool:
    """True where ``dense`` should attend q [T, H, D]: a whole prompt, a cache without rounding, a shorter time.

    ``window`` is the number of tokens seen by a token at most, 0 for all.
    """
    prompt = current_whole_prompt()
    if prompt is None or pool != q.dtype:
        return False
    tokens, heads, dim = q.shape
    fits = q.dtype in (torch.float16, torch.bfloat16) and max(dim, v.shape[2]) <= MAX_HEAD_DIM
    if not fits or tokens < 2 or (window and window < tokens):
        return False
    shape = (tokens, heads * dim, k.shape[1] * dim)
    best = selection.choose(
        "paged_attention", "16-bit", shape, common.architecture(q.device), {"triton": True, "sdpa": True}
    )
    prompt.used |= best == "sdpa"
    return best == "sdpa"


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a sequence: q [T, H, D], k [T, Hkv, D] and v [T, Hkv, Dv] give [T, H, Dv]."""
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

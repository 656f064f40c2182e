"""The bytes of int8 KV pools, found by the formula of each layout: a second method beside the views of the spec."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels.kv_rows import KV_SCALE_BYTES, is_interleaved


def stored_rows(cache: Tensor, slots: Tensor, others: int | None, is_value: bool = False) -> Tensor:
    """Codes and scale [T, Hkv, D + 4] int8 of the tokens at ``slots`` of a pool of K or V.

    ``others`` is the head size of the other pool; None for latent KV.
    """
    _, size, heads, row = cache.shape
    dim = row - KV_SCALE_BYTES
    if others is None or not is_interleaved(size, *((others, dim) if is_value else (dim, others))):
        return cache.flatten(0, 1)[slots]
    channel, head = torch.arange(dim), torch.arange(heads)[:, None]
    block, at = (slots // size)[:, None, None], (slots % size)[:, None, None]
    first = (block * heads + head) * size * row
    key = channel // 4 * 4 * size + at * 4 + channel % 4
    value = at // 4 * 4 * dim + channel * 4 + at % 4
    codes = cache.flatten()[first + (value if is_value else key)]
    scales = cache.flatten()[first + size * dim + at * 4 + torch.arange(4)]
    return torch.cat((codes if is_value else codes ^ -128, scales), dim=-1)

"""The spec of block-sparse prefill: the blocks of keys that a block of queries reads.

Blocks are of ``BLOCK`` tokens at fixed positions. The antidiagonals of XAttention (arXiv 2503.16428) say which blocks
of keys matter: tokens are taken in groups of ``STRIDE``, and the score of a group of queries against a group of keys is
the mean over t of ``scale * q[STRIDE - 1 - t] . k[t]``. A softmax over the groups of keys up to the queries' own, added
up over the groups of queries of a block and over the query heads of a KV head, is the mass of each block of keys. The
block reads the fewest blocks that have a share ``cover`` of the mass, the first block, its own, and the one before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK, STRIDE = 64, 16


def readable_keys(q: Tensor, k: Tensor, scale: float, cover: float, first: int) -> Tensor | None:
    """The keys that each query may read beside the causal mask, [H, Tq, Tk] bool; None for all.

    The queries are the last Tq of the Tk positions. A block of queries is dense where a part of it is in another call,
    and before position ``first``.

    Args:
        q: [Tq, H, D].
        k: [Tk, Hkv, D].
    """
    tq, tk, shared = len(q), len(k), q.shape[1] // k.shape[1]
    start = tk - tq
    blocks = range(-(-max(start, first) // BLOCK), tk // BLOCK)
    if not blocks:
        return None
    read = torch.ones(q.shape[1], tq, tk, dtype=torch.bool, device=q.device)
    for block in blocks:
        rows = slice(block * BLOCK - start, (block + 1) * BLOCK - start)
        chosen = chosen_blocks(q[rows], k[: (block + 1) * BLOCK], scale, cover)  # [Hkv, blocks]
        keys = chosen.repeat_interleave(shared, 0).repeat_interleave(BLOCK, 1)
        read[:, rows, : (block + 1) * BLOCK] = keys[:, None]
    return read


def chosen_blocks(q: Tensor, k: Tensor, scale: float, cover: float) -> Tensor:
    """The blocks of keys that a block of queries reads, [Hkv, blocks] bool.

    Args:
        q: [BLOCK, H, D], of the last positions.
        k: [blocks * BLOCK, Hkv, D].
    """
    mass = block_mass(q, k, scale)
    order = mass.sort(dim=1, descending=True, stable=True)
    before = order.values.cumsum(1) - order.values
    chosen = torch.zeros_like(mass, dtype=torch.bool).scatter(
        1, order.indices, before < cover * mass.sum(1, True)
    )
    chosen[:, [0, -1, max(-2, -mass.shape[1])]] = True
    return chosen


def block_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The mass of each block of keys for a block of queries, [Hkv, blocks] float32; see ``chosen_blocks``."""
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    groups = k.float().unflatten(0, (-1, STRIDE)).permute(2, 0, 1, 3).flatten(2)  # [Hkv, groups, STRIDE * D]
    queries = q.float().unflatten(0, (-1, STRIDE)).flip(1).permute(2, 0, 1, 3).flatten(2)
    scores = (
        queries @ groups.repeat_interleave(shared, 0).transpose(1, 2) * (scale / STRIDE)
    )  # [H, rows, groups]
    rows, columns = scores.shape[1:]
    later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return weights.view(heads // shared, shared * rows, -1, BLOCK // STRIDE).sum((1, 3))

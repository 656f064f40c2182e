"""Paged attention on the CPU by PyTorch's flash attention, a sequence of the ragged batch at a time.

A sequence of new tokens only attends to the K and V at hand, causal, without reading the cache back. A sequence with
a prefix reads its blocks: as a view of consecutive blocks, by a gather otherwise. Flash attention on the CPU reads
grouped KV heads natively and never builds the score matrix, so memory stays linear.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optkit.kernels.kernel import Kernel
from optkit.kernels.reference import causal_mask, write_kv

if TYPE_CHECKING:
    pass


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Tensor:
    """See ``reference.attention``. No soft-cap, sinks or slopes, and no int8 pools."""
    refuse(k_cache, sinks, slopes, softcap, positions)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    batch = query_start, seq_lens, block_tables
    return attend_batch(q, k, v, k_cache, v_cache, *batch, scale, window, chunk)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Tensor:
    """See ``reference.paged_attention``; without the same as ``attention``."""
    refuse(k_cache, sinks, slopes, softcap, positions)
    batch = query_start, seq_lens, block_tables
    return attend_batch(q, k, v, k_cache, v_cache, *batch, scale, window, chunk)


def refuse(
    k_cache: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    softcap: float,
    positions: Tensor | None,
) -> None:
    """Refuse a call beyond PyTorch's kernel.

    Raises:
        ValueError: the call has a soft-cap, sinks, slopes, a tree of guesses or an int8 pool.
    """
    if softcap or sinks is not None or slopes is not None or k_cache.dtype is torch.int8:
        raise ValueError(
            "the sdpa kernel has no soft-cap, sinks or slopes, and no int8 pools; select() passes it over for them"
        )
    if positions is not None:
        raise ValueError("the sdpa kernel verifies no trees of guesses")


def attend_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    chunk: int,
) -> Tensor:
    """Attention of one sequence after the other over pools that hold K and V."""
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    pieces = []
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        count = starts[s + 1] - starts[s]
        if count == length:
            keys, values = k[rows], v[rows]
        else:
            blocks = block_tables[s]
            keys = read_kv(k_cache, blocks, length)
            values = keys[..., : v.shape[2]] if v_cache is None else read_kv(v_cache, blocks, length)
        pieces.append(attend(q[rows], keys, values, scale, window, chunk))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def read_kv(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a sequence: a view of consecutive blocks, else a gather."""
    used = -(-length // cache.shape[1])
    ids = blocks[:used].tolist()
    if ids[-1] - ids[0] == used - 1 and all(b - a == 1 for a, b in itertools.pairwise(ids)):
        return cache[ids[0] : ids[0] + used].flatten(0, 1)[:length]
    return cache.index_select(0, blocks[:used]).flatten(0, 1)[:length]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, chunk: int) -> Tensor:
    """Flash attention of a sequence: q [Tq, H, D] are the last Tq of k's Tk positions; the result is [Tq, H, Dv]."""
    tq, tk = q.shape[0], k.shape[0]
    limited = 0 < window < tk or 0 < chunk < tk
    causal = tq == tk and not limited
    mask = None if causal or (tq == 1 and not limited) else causal_mask(tq, tk, window, q.device, chunk)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal and tq > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def plain(options: Mapping[str, Any]) -> bool:
    special = options.get("softcap") or options.get("sparse_cover")
    return not special and options.get("kv_dtype", "float32") == "float32"


def without_weights(weights: Mapping[int, Tensor]) -> bool:
    """True for a site without sinks and slopes."""
    return not weights


KERNELS = tuple(
    Kernel(
        name,
        "sdpa",
        function,
        lambda target: target.kind == "cpu",
        accepts=without_weights,
        handles=plain,
        needs="a float32 KV cache; no soft-cap, sinks or slopes, and dense prefill",
    )
    for name, function in (("attention", attention), ("paged_attention", paged_attention))
)

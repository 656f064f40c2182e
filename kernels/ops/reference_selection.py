"""The spec of attention over selected blocks (Quest, arXiv 2406.10774): a generated token reads part of a long context.

The module is a part of ``reference``, which exports every name.

A pool of bounds is [blocks, block_size, bytes] int8. The bytes of a block begin with a row for each whole
``BOUNDS_SPAN`` tokens and each KV head, [spans, Hkv, 2 D + 4]: the largest number of every channel of the keys, then
the smallest, as int8, and a float32 scale for both. The numbers are rounded away from each other, so no key is outside.
A query's product with a key is at most the sum over the channels of the larger of two products, with the upper and with
the lower bound. Queries are rounded before, to ``QUERY_STEPS`` steps on either side of zero, so sums are of integers.

Bounds are computed from the stored keys when the last token of a span is written, and read for blocks alone whose last
token comes before the query's block. So bounds agree with the keys in the cache: also after a block was reused, after
rejected drafts, and in a block copied with the bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels.reference_attention import (
    KV_SCALE_BYTES,
    attend,
    check_decode,
    gather_kv,
    heads_per_key,
    kv_parts,
    write_kv,
)
from optkit.kernels.reference_sparse_prefill import readable_keys

BOUNDS_SPAN = 8  # tokens
QUERY_STEPS = 4095.0  # on either side of zero
FIRST_BLOCKS, LAST_BLOCKS = 1, 2  # first and last blocks of a context, which are always read


def bounds_row(dim: int) -> int:
    """Bytes of the bounds of a span under a KV head."""
    return 2 * dim + KV_SCALE_BYTES


def bounds_token_bytes(kv_heads: int, dim: int) -> int:
    """Bytes of a pool of bounds for each token."""
    return -(-kv_heads * bounds_row(dim) // BOUNDS_SPAN)


def key_bounds(keys: Tensor) -> Tensor:
    """The bounds of keys [n, Hkv, D] as rows [Hkv, 2 D + 4] int8."""
    upper, lower = keys.amax(0).to(torch.float32), keys.amin(0).to(torch.float32)
    most = torch.maximum(upper.abs(), lower.abs()).amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127.0) / most, torch.zeros_like(most))
    steps = torch.cat(((upper * inverse).ceil(), (lower * inverse).floor()), dim=-1).clamp(-127, 127)
    return torch.cat((steps.to(torch.int8), (most / 127.0).view(torch.int8)), dim=-1)


def bounds_of(k_bounds: Tensor, blocks: Tensor, kv_heads: int, dim: int) -> Tensor:
    """The rows of ``blocks``: [n, spans, Hkv, 2 D + 4] int8."""
    spans, row = k_bounds.shape[1] // BOUNDS_SPAN, bounds_row(dim)
    return k_bounds[blocks].flatten(1)[:, : spans * kv_heads * row].unflatten(1, (spans, kv_heads, row))


def write_bounds(k_cache: Tensor, k_bounds: Tensor, slot_mapping: Tensor, dim: int) -> None:
    """Store the bounds of each span whose last token is among the new tokens at ``slot_mapping``."""
    size, kv_heads, row = k_cache.shape[1], k_cache.shape[2], bounds_row(dim)
    for slot in slot_mapping.tolist():
        block, offset = divmod(slot, size)
        if slot >= 0 and (offset + 1) % BOUNDS_SPAN == 0:
            keys = gather_kv(k_cache, torch.tensor([block]), size)[offset + 1 - BOUNDS_SPAN : offset + 1]
            start = offset // BOUNDS_SPAN * kv_heads * row
            k_bounds[block].flatten()[start : start + kv_heads * row] = key_bounds(keys).flatten()


def query_steps(q: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [H, D] in whole steps, and what a step is worth [H, 1]: ``QUERY_STEPS`` for the largest number."""
    most = q.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    inverse = torch.where(most > 0, QUERY_STEPS / most, torch.zeros_like(most))
    steps = (q * inverse).clamp(-QUERY_STEPS, QUERY_STEPS)
    return (steps + torch.full_like(steps, 0.5).copysign(steps)).trunc(), most / QUERY_STEPS


def most_scores(q: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """The largest possible scores [H, n] of queries q [H, D] (rounded) with keys in ``bounds`` [n, Hkv, 2 D + 4]."""
    values, scales = kv_parts(bounds)
    shared = heads_per_key(q.shape[0], values.shape[1])
    values, scales = (x.repeat_interleave(shared, dim=1) for x in (values.to(torch.float64), scales))
    steps, step = query_steps(q)
    halves = torch.cat((steps.clamp(min=0), steps.clamp(max=0)), dim=-1).to(torch.float64)
    products = torch.einsum("hd,nhd->hn", halves, values).to(
        torch.float32
    )  # of whole numbers: exact until here
    return products * (scales.T * (step * scale))


def select_blocks(q: Tensor, bounds: Tensor, count: int, first: int, last: int, scale: float) -> Tensor:
    """The ``count`` blocks from ``first`` to ``last`` - 1 of most weight for each KV head: [Hkv, count], ascending.

    q [H, D]; ``bounds`` [blocks, spans, Hkv, 2 D + 4]. The weight of a block is the sum of ``softmax`` of the largest
    scores over all spans of the blocks in question, over the spans of the block and the query heads of the KV head. Of
    equal blocks the earlier is taken.
    """
    kv_heads = bounds.shape[2]
    scores = most_scores(q, bounds[first:last].flatten(0, 1), scale)
    weights = scores.softmax(dim=-1).unflatten(1, (last - first, -1)).sum(-1)
    weights = weights.unflatten(0, (kv_heads, -1)).sum(1)
    order = weights.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return order.sort(dim=-1).values + first


def selects(position: int, prompt_len: int, block_size: int, budget: int, min_context: int) -> bool:
    """True for a token with a choice of blocks: generated, in a context of at least ``min_context`` tokens and beyond
    the budget. Blocks of other sizes than whole spans are all read.
    """
    blocks = position // block_size + 1
    long = position + 1 >= min_context and blocks > budget_blocks(budget, block_size)
    return long and position >= prompt_len and block_size % BOUNDS_SPAN == 0


def budget_blocks(budget: int, block_size: int) -> int:
    """The number of blocks for a token, at least a chosen block beside the first and the last ones."""
    return max(budget // block_size, FIRST_BLOCKS + LAST_BLOCKS + 1)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_bounds: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    prompt_lens: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    budget: int,
    min_context: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Tensor:
    """``attention`` where generated tokens of long contexts read ``budget`` tokens, in blocks chosen by bounds of keys.

    Arguments have the names of ``attention``. ``prompt_lens`` [S] int32 counts the tokens of each sequence's prompt,
    which read all earlier tokens. A later token of a context of at least ``min_context`` tokens and beyond the budget
    (``selects``) reads, under each KV head, the first block, the last two and the blocks of ``select_blocks``. The
    choice depends on the query, the keys of the sequence and the position alone, not on the batch, so drafts, chunks
    and preemption change nothing. Mutates ``k_cache``, ``v_cache`` and ``k_bounds``.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if q.device.type == "meta":
        return out
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    write_bounds(k_cache, k_bounds, slot_mapping, k.shape[2])
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    check_decode(len(q), starts)
    for s, (length, prompt) in enumerate(zip(lengths, prompt_lens.tolist(), strict=True)):
        if not length:
            continue
        keys, values = (gather_kv(pool, block_tables[s], length) for pool in (k_cache, v_cache))
        first, end, size = starts[s], starts[s + 1], k_cache.shape[1]
        chosen = [
            t for t in range(first, end) if selects(length - end + t, prompt, size, budget, min_context)
        ]
        rows, seen = (
            slice(first, end - len(chosen)),
            length - len(chosen),
        )  # the tokens that select are the last
        if rows.start < rows.stop:
            dense = q[rows], keys[:seen], values[:seen]
            read = readable_keys(*dense[:2], scale, sparse_cover, sparse_from) if sparse_cover else None
            out[rows] = attend(*dense, scale, 0, softcap, 0, sinks, read=read)
        for row in chosen:
            position = length - end + row
            blocks = read_blocks(q[row], k_bounds, block_tables[s], position, k.shape[1], size, budget, scale)
            past = slice(0, position + 1)
            out[row] = attend_blocks(q[row], keys[past], values[past], blocks, size, scale, softcap, sinks)
    return out


def read_blocks(
    q: Tensor,
    k_bounds: Tensor,
    table: Tensor,
    position: int,
    kv_heads: int,
    block_size: int,
    budget: int,
    scale: float,
) -> Tensor:
    """The numbers of the blocks of a sequence that its token at ``position`` reads, for each KV head: [Hkv, n]."""
    blocks = position // block_size + 1
    last = blocks - LAST_BLOCKS
    count = budget_blocks(budget, block_size) - FIRST_BLOCKS - LAST_BLOCKS
    bounds = bounds_of(k_bounds, table[:blocks].long(), kv_heads, q.shape[1])
    chosen = select_blocks(q, bounds, count, FIRST_BLOCKS, last, scale)
    always = (torch.arange(n, m).expand(len(chosen), -1) for n, m in ((0, FIRST_BLOCKS), (last, blocks)))
    return torch.cat((next(always), chosen, next(always)), dim=1)


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """``attend`` of a token q [H, D] over k and v [n, Hkv, ...], for each KV head in its ``blocks`` [Hkv, m] alone."""
    shared, out = heads_per_key(q.shape[0], k.shape[1]), []
    for head, chosen in enumerate(blocks):
        tokens = (chosen[:, None] * block_size + torch.arange(block_size)).flatten()
        tokens = tokens[tokens < len(k)]
        heads = slice(head * shared, (head + 1) * shared)
        own = None if sinks is None else sinks[heads]
        part = slice(head, head + 1)
        out.append(attend(q[None, heads], k[tokens, part], v[tokens, part], scale, 0, softcap, 0, own)[0])
    return torch.cat(out)

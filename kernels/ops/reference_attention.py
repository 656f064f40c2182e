"""The spec of attention: RoPE, the paged KV cache, and attention over the cache.

The module is a part of ``reference``, which exports every name.

A pool of a layer is [blocks, block_size, Hkv, D] of a float type; or of bytes, [blocks, block_size, Hkv, D + 4], for
int8 and E4M3 values with a float32 scale for each token and head. The layout of the bytes in a block depends on the
device:

- *Rows*: D values and the scale, contiguous. Latent KV on a CPU, and sizes that are not whole lines.
- *Interleaved* (``kv_rows.is_interleaved``), int8 on a CPU: a block is all values of the first head, the scales
  [block_size] behind them, then the next head. Values of K are [D / 4, block_size, 4] and have zero point 128; those of
  V are [block_size / 4, D, 4 tokens] and signed. So a tile of 16 keys is multiplied as it lies in memory.
- *Planar* (``is_planar``), on a GPU: a block is all values, [block_size, Hkv, D], and then all scales,
  [block_size, Hkv]: rows of D + 4 bytes would break every load into pieces of four.

A block has the same size in all layouts, and only attention and the move of tokens look into blocks.

Latent KV (multi-head latent attention, arXiv 2405.04434) has no pool of V, ``v_cache`` is None: the value of a token is
the first Dv channels of its key, in a quantized pool with the key's scale. The v of a call, which must be these
channels of k, is read for its shape alone.

Padding for captured CUDA graphs: a token of slot -1 is not stored, a sequence of length 0 attends to nothing and
gives zeros. Results for tokens behind the last sequence are not specified.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.kv_rows import KV_SCALE_BYTES, WORD, is_interleaved
from optkit.kernels.reference_fp8 import quantize_fp8_per_token
from optkit.kernels.reference_sparse_prefill import readable_keys

KV_CODES = {torch.int8: torch.int8, torch.uint8: torch.float8_e4m3fn}  # type of a pool -> type of the codes


def rope_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] for ``positions`` [T] and ``inv_freq`` [D/2]; the two halves of D repeat."""
    if positions.device.type == "meta":
        table = inv_freq.new_empty(positions.shape[0], 2 * inv_freq.shape[0])
        return table, table
    angles = positions.to(torch.float32)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half form (arXiv 2104.09864): x [T, H, D], cos and sin [T, D]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """RoPE of the new tokens' q [T, H, D] and k [T, Hkv, D], and the write of K and V: ``(rope(q), rope(k))``.

    cos and sin are [T, R]: with R < D only the first R channels of a head rotate. The op is the first half of
    ``attention``; ``paged_attention`` is the second. Mutates ``k_cache`` and ``v_cache``.
    """
    q, k = partial_rope(q, cos, sin), partial_rope(k, cos, sin)
    if q.device.type != "meta":
        write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rope`` of the first R channels of x [T, H, D], for cos and sin [T, R]; of x's type."""
    rotary = cos.shape[-1]
    rotated = rope(x[..., :rotary], cos, sin).to(x.dtype)
    return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)


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
    """Causal attention of a ragged batch over the paged KV cache, after a write of K and V to the cache.

    q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]; the cache and batch tensors are described in docs/architecture.md.
    Query head h reads KV head ``h // (H // Hkv)``. The result is [T, H, Dv]. Mutates ``k_cache`` and ``v_cache``.

    - ``window`` > 0 limits a token to the last ``window`` positions including its own; ``chunk`` > 0 to the positions
      from the last multiple of ``chunk`` on.
    - ``softcap`` > 0 squashes scores to ``softcap * tanh(s / softcap)``.
    - ``slopes`` [H] float32 adds ``slope * (key position - query position)`` to a head's scores (ALiBi,
      arXiv 2108.12409).
    - ``sinks`` [H] float32 is one more score for each head, without a value: it takes its share of the softmax.
    - ``sparse_cover`` > 0 has blocks of queries from position ``sparse_from`` on read only the blocks of keys with
      such a share of an estimate of the attention (``reference_sparse_prefill``). A layer with a window, chunks or
      slopes stays dense.
    - ``positions`` [T] int64 says which new tokens are a *tree* of guesses (arXiv 2305.09781), in preorder.
      A token sees the tokens before the call and its ancestors: the last token before it that is one position earlier
      is its parent. The first token is the root. Rows of increasing positions, with or without gaps, are a sequence as
      without ``positions``.

    int8 and uint8 pools hold rows of ``quantize_kv``. K and V of the call are attended in their quantized form, so
    the result does not depend on the cut of a prompt into calls.
    """
    if q.device.type != "meta":
        write_kv(k, v, k_cache, v_cache, slot_mapping)
    batch = query_start, seq_lens, block_tables
    options: tuple[Any, ...] = scale, window, softcap, chunk, sparse_cover, sparse_from
    scores: tuple[Any, ...] = sinks, slopes, positions, *options
    return paged_attention(q, k, v, k_cache, v_cache, *batch, *scores)


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
    """``attention`` over a cache that holds K and V of the call already, as after ``rope_kv_write``.

    k and v are the stored rows: a kernel may read them in place of the cache for a sequence without other tokens. A
    batch with as many tokens as sequences has one token for each. Layers that share K and V have one ``attention``,
    which writes, and then a ``paged_attention`` each.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if q.device.type == "meta":
        return out
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    check_decode(len(q), starts)
    for s, length in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        if length:
            keys, values = read_kv(k_cache, v_cache, block_tables[s], length)
            values = keys[..., : v.shape[2]] if values is None else values
            tree = None if positions is None else as_tree(positions[rows])
            dense = not sparse_cover or window > 0 or chunk > 0 or slopes is not None or tree is not None
            read = None if dense else readable_keys(q[rows], keys, scale, sparse_cover, sparse_from)
            scores = scale, window, softcap, chunk, sinks, slopes, tree, read
            out[rows] = attend(q[rows], keys, values, *scores)
    return out


def check_decode(tokens: int, starts: Sequence[int]) -> None:
    """Refuse a padded batch with the shape of a decode, since kernels read shapes alone.

    Raises:
        ValueError: no more tokens than sequences, and a sequence with several.
    """
    if tokens < len(starts) and any(end - start > 1 for start, end in pairwise(starts)):
        raise ValueError(f"{tokens} tokens of {len(starts) - 1} sequences are a decode, and one has several")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor) -> None:
    """Store K and V of the new tokens at their slots (``block * block_size + offset``); -1 stores nothing."""
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[: len(kept)][kept], v[: len(kept)][kept], slot_mapping[kept]
    if v_cache is not None and interleaved(k_cache, v_cache):
        write_interleaved(k, k_cache, slot_mapping, is_value=False)
        write_interleaved(v, v_cache, slot_mapping, is_value=True)
        return
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if cache is None:
            continue
        if is_planar(cache):
            block, offset = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
            for plane, part in zip(kv_planes(cache), kv_parts(quantize_kv(rows, cache.dtype)), strict=True):
                plane[block, offset] = part
        else:
            stored = quantize_kv(rows, cache.dtype) if cache.dtype in KV_CODES else rows.to(cache.dtype)
            cache.flatten(0, 1).index_copy_(0, slot_mapping, stored)


def write_interleaved(rows: Tensor, cache: Tensor, slots: Tensor, is_value: bool) -> None:
    """Store K or V [T, Hkv, D] in an interleaved pool at ``slots`` [T]."""
    codes, scales = interleaved_views(cache, is_value)
    values, stored_scales = kv_parts(quantize_kv(rows))
    block, at = slots // cache.shape[1], slots % cache.shape[1]
    scales[block, at] = stored_scales
    if is_value:
        codes[block, at // WORD, at % WORD] = values
    else:
        codes[block, at] = (values ^ -128).unflatten(-1, (-1, WORD))


def read_kv(
    k_cache: Tensor, v_cache: Tensor | None, blocks: Tensor, length: int
) -> tuple[Tensor, Tensor | None]:
    """K and V [length, Hkv, D] of the first ``length`` tokens of a sequence from its blocks; no V of latent KV."""
    if v_cache is None:
        return gather_kv(k_cache, blocks, length), None
    if interleaved(k_cache, v_cache):
        keys = gather_interleaved(k_cache, blocks, length, is_value=False)
        return keys, gather_interleaved(v_cache, blocks, length, is_value=True)
    return gather_kv(k_cache, blocks, length), gather_kv(v_cache, blocks, length)


def gather_interleaved(cache: Tensor, blocks: Tensor, length: int, is_value: bool) -> Tensor:
    """``gather_kv`` from an interleaved pool."""
    used = blocks[: -(-length // cache.shape[1])].long()
    codes, scales = (view[used] for view in interleaved_views(cache, is_value))
    codes = codes.flatten(0, 2) if is_value else codes.flatten(-2).flatten(0, 1) ^ -128
    return codes[:length].to(torch.float32) * scales.flatten(0, 1)[:length, :, None]


def gather_kv(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens [length, Hkv, D] of a sequence from its blocks, of rows or planes."""
    used = blocks[: -(-length // cache.shape[1])]
    if is_planar(cache):
        values, scales = (plane[used.long()].flatten(0, 1)[:length] for plane in kv_planes(cache))
        return values.view(KV_CODES[cache.dtype]).to(torch.float32) * scales[..., None]
    rows = cache.index_select(0, used).flatten(0, 1)[:length]
    return rows if cache.dtype not in KV_CODES else dequantize_kv(rows)


def interleaved(k_cache: Tensor, v_cache: Tensor) -> bool:
    """True for interleaved pools."""
    if k_cache.dtype is not torch.int8 or is_planar(k_cache):
        return False
    return is_interleaved(
        k_cache.shape[1], *(cache.shape[3] - KV_SCALE_BYTES for cache in (k_cache, v_cache))
    )


def interleaved_views(cache: Tensor, is_value: bool) -> tuple[Tensor, Tensor]:
    """Views of an interleaved pool: codes, and scales [blocks, block_size, Hkv].

    Codes of K are [blocks, block_size, Hkv, D / 4, 4], those of V [blocks, block_size / 4, 4, Hkv, D].
    """
    blocks, size, heads, row = cache.shape
    dim = row - KV_SCALE_BYTES
    codes, scales = cache.view(blocks, heads, size * row).split([size * dim, size * KV_SCALE_BYTES], dim=2)
    scales = scales.view(torch.float32).transpose(1, 2)
    if is_value:
        return codes.unflatten(2, (size // WORD, dim, WORD)).permute(0, 2, 4, 1, 3), scales
    return codes.unflatten(2, (dim // WORD, size, WORD)).permute(0, 3, 1, 2, 4), scales


def is_planar(cache: Tensor) -> bool:
    """True for quantized pools on a GPU: in a block all scales stand behind all values."""
    return cache.dtype in KV_CODES and cache.device.type == "cuda"


def kv_planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a planar pool: values [blocks, block_size, Hkv, D] of its type, scales [blocks, block_size, Hkv]."""
    blocks, size, heads, row = cache.shape
    dim = row - KV_SCALE_BYTES
    values = cache.as_strided((blocks, size, heads, dim), (size * heads * row, heads * dim, dim, 1))
    scales = cache.flatten(1)[:, size * heads * dim :].view(torch.float32)
    return values, scales.unflatten(1, (size, heads))


def quantize_kv(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """K or V [T, Hkv, D] as rows [T, Hkv, D + 4]: int8, or uint8 with the bytes of E4M3.

    Each token and head has its own scale, ``absmax / 127`` or ``absmax / 448``: a row is D values and the four bytes
    of the float32 scale.
    """
    x = x.to(torch.float32)
    if dtype == torch.uint8:
        values, scale = quantize_fp8_per_token(x)
    else:
        absmax = x.abs().amax(dim=-1, keepdim=True)
        scale = absmax / 127.0
        inverse = torch.where(absmax > 0, 127.0 / absmax, torch.zeros_like(absmax))
        values = torch.round(x * inverse).to(torch.int8)
    stored = scale.flatten().view(dtype).view(*x.shape[:-1], KV_SCALE_BYTES)
    return torch.cat((values.view(dtype), stored), dim=-1)


def kv_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values [..., D] and the float32 scales [...] of rows of ``quantize_kv``."""
    values, scale = rows.split([rows.shape[-1] - KV_SCALE_BYTES, KV_SCALE_BYTES], dim=-1)
    aligned = scale.clone(memory_format=torch.contiguous_format)  # it may lie at any byte
    return values, aligned.view(torch.float32)[..., 0]


def dequantize_kv(rows: Tensor) -> Tensor:
    """The float32 K or V [..., D] of rows [..., D + 4] of an int8 or a uint8 (E4M3) pool."""
    values, scale = kv_parts(rows)
    return values.contiguous().view(KV_CODES[rows.dtype]).to(torch.float32) * scale[..., None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: Tensor | None = None,
    read: Tensor | None = None,
) -> Tensor:
    """Attention of the last Tq tokens of a sequence: q [Tq, H, D] over k, v [Tk, Hkv, ...]; see ``attention``.

    ``read`` [H, Tq, Tk] bool excludes further keys than the causal mask.
    """
    tq, tk, shared = q.shape[0], k.shape[0], heads_per_key(q.shape[1], k.shape[1])
    dtype = torch.promote_types(q.dtype, k.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores + slopes.to(dtype)[:, None, None] * distances(tq, tk, q.device, positions)
    seen = causal_mask(tq, tk, window, q.device, chunk, positions)
    scores = scores.masked_fill(~seen, float("-inf"))
    if read is not None:
        scores = scores.masked_fill(~read, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, tq, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :tk], v)


def heads_per_key(heads: int, key_heads: int) -> int:
    """The number of heads in a row that share a head of the keys.

    Raises:
        ValueError: ``heads`` is not a multiple of ``key_heads``.
    """
    if key_heads <= 0 or heads % key_heads:
        raise ValueError(f"{heads} heads can't share {key_heads} heads of keys")
    return heads // key_heads


def distances(tq: int, tk: int, device: torch.device, positions: Tensor | None = None) -> Tensor:
    """[Tq, Tk] int64: the key's position less the query's; the queries are the last Tq of Tk positions.

    ``positions`` [Tq] are those of the queries in a tree of guesses.
    """
    at = key_positions(tq, tk, device, positions)
    return at[None] - at[tk - tq :, None]


def key_positions(tq: int, tk: int, device: torch.device, positions: Tensor | None = None) -> Tensor:
    """The position of each key, [Tk] int64, counted from the sequence's first token."""
    at = torch.arange(tk, device=device)
    return at if positions is None else torch.cat((at[: tk - tq], tk - tq + positions - positions[0]))


def causal_mask(
    tq: int, tk: int, window: int, device: torch.device, chunk: int = 0, positions: Tensor | None = None
) -> Tensor:
    """[Tq, Tk] bool, True where the query may look: the queries are the last Tq of Tk positions."""
    distance = distances(tq, tk, device, positions)
    mask = distance <= 0 if positions is None else tree_mask(tk - tq, positions)
    if window > 0:
        mask = mask & (distance > -window)
    if chunk > 0:
        key = key_positions(tq, tk, device, positions)
        mask = mask & (key[None] // chunk == key[tk - tq :, None] // chunk)
    return mask


def as_tree(positions: Tensor) -> Tensor | None:
    """The ``positions`` [T] of a sequence's new tokens if they are a tree, None where each is after the one before."""
    return None if bool((positions.diff() > 0).all()) else positions


def depths_of(positions: Tensor) -> list[int]:
    """The depth of each node of a tree below its first.

    Raises:
        ValueError: a node has no parent.
    """
    depths: list[int] = (positions - positions[0]).tolist()
    for node, (before, depth) in enumerate(pairwise(depths), 1):
        if not 1 <= depth <= before + 1:
            raise ValueError(f"node {node} of a tree has depth {depth} after a node of depth {before}")
    return depths


def check_trees(positions: Tensor, query_start: Tensor) -> None:
    """Refuse trees whose nodes have no parents, which kernels would look for.

    Raises:
        ValueError: as of ``depths_of``.
    """
    for start, end in pairwise(query_start.tolist()):
        tree = as_tree(positions[start:end])
        if tree is not None:
            depths_of(tree)


def tree_mask(context: int, positions: Tensor) -> Tensor:
    """[Tq, context + Tq] bool, True for the context, the node itself and its ancestors; see ``attention``.

    Raises:
        ValueError: as of ``depths_of``.
    """
    depths = depths_of(positions)
    mask = torch.zeros(len(depths), context + len(depths), dtype=torch.bool, device=positions.device)
    mask[:, :context] = True
    path: list[int] = []  # the latest node at each depth
    for node, depth in enumerate(depths):
        path[depth:] = [node]
        mask[node, [context + ancestor for ancestor in path]] = True
    return mask

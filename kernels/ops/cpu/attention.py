"""Paged attention by optkit's native kernel (attention.cpp): cache write, ragged batch, window, chunks, soft-cap,
sinks and slopes in a call.

Nothing is gathered and no mask is built: the kernel follows the block tables. An output row has the same bits in any
batch, with any cut of the prompt into chunks and any number of threads: tiles of 64 and splits of 256 keys lie at fixed
absolute positions and are added in order, in prefill and decode alike. The price: decode transposes float32 keys like
prefill, although dot products along D would suit a few rows better. An int8 cache holds them transposed
(``reference_attention``, *interleaved*).

AVX-512 and AVX2 give the same bits too; the portable variant, without fused multiply-add, differs by rounding.

Over an int8 cache (``reference.quantize_kv``) products are products of integers. Queries are rounded to
16 bits and weights to 255 steps: errors up to 1/65278 and 1/510 of the largest, beside 1/254 for keys and values
(decision 0045). The statements on bits hold for int8 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.kernels import reference, reference_attention
from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import BLOCK_SIZE, SEQUENCES, TABLE_WIDTH
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.kernel import Kernel
from optkit.kernels.kv_rows import KV_SCALE_BYTES


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
    """See ``reference.attention``. q, k and v may have any strides; float32 (else the reference runs)."""
    batch = query_start, seq_lens, block_tables
    options: tuple[Any, ...] = scale, window, softcap, chunk, sparse_cover, sparse_from
    scores: tuple[Any, ...] = sinks, slopes, positions, *options
    if not native_types(q, k_cache):
        return reference.attention(q, k, v, k_cache, v_cache, slot_mapping, *batch, *scores)
    native.require_vector(slot_mapping, q.shape[0], torch.int64, "slot_mapping")
    return run(q, k, v, k_cache, v_cache, slot_mapping, *batch, *scores)


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
    """See ``reference.paged_attention``; k and v are read for their shapes alone."""
    batch = query_start, seq_lens, block_tables
    options: tuple[Any, ...] = scale, window, softcap, chunk, sparse_cover, sparse_from
    scores: tuple[Any, ...] = sinks, slopes, positions, *options
    if not native_types(q, k_cache):
        return reference.paged_attention(q, k, v, k_cache, v_cache, *batch, *scores)
    return run(q, k, v, k_cache, v_cache, None, *batch, *scores)


def native_types(q: Tensor, k_cache: Tensor) -> bool:
    return q.dtype is torch.float32 and k_cache.dtype in (torch.float32, torch.int8)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    positions: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    sparse_cover: float,
    sparse_from: int,
) -> Tensor:
    """Attention of checked tensors; without ``slot_mapping`` nothing is written.

    Without ``v_cache`` the kernel gets no address of v either: values are parts of the keys in ``k_cache``.
    """
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    check(q, k, v, k_cache, v_cache)
    check_batch(query_start, seq_lens, block_tables)
    for numbers, name in ((sinks, "sinks"), (slopes, "slopes")):
        if numbers is not None:
            native.require_vector(numbers, heads, torch.float32, name)
    if positions is not None:
        native.require_vector(positions, tokens, torch.int64, "positions")
        reference_attention.check_trees(positions, query_start)
    out = torch.empty((tokens, heads, v_dim))
    native.library().optkit_attention(
        q.data_ptr(),
        k.data_ptr(),
        0 if v_cache is None else v.data_ptr(),
        k_cache.data_ptr(),
        address(v_cache),
        address(sinks),
        address(slopes),
        out.data_ptr(),
        address(slot_mapping),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        tokens,
        seq_lens.shape[0],
        block_tables.shape[1],
        k_cache.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        heads,
        kv_heads,
        dim,
        v_dim,
        window,
        chunk,
        scale,
        softcap,
        sparse_cover,
        sparse_from,
        k_cache.dtype is torch.int8,
        address(positions),
        native.threads(),
    )
    return out


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def check(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None) -> None:
    """Refuse rows of other sizes than the pools have.

    Raises:
        ValueError: a tensor has another dtype or shape than the kernel would read or write.
    """
    (tokens, heads, dim), (kv_heads, v_dim) = q.shape, v.shape[1:]
    extra = KV_SCALE_BYTES if k_cache.dtype is torch.int8 else 0
    block = k_cache.shape[:2]
    native.require(k.dtype is v.dtype is torch.float32, "k and v must be float32")
    native.require(
        k.shape == (tokens, kv_heads, dim) and v.shape[0] == tokens, "q, k and v differ in rows or heads"
    )
    reference.heads_per_key(heads, kv_heads)
    native.require(k_cache.shape == (*block, kv_heads, dim + extra), "k_cache has other rows than k")
    native.require(k_cache.is_contiguous(), "the pools must be contiguous")
    if v_cache is None:
        native.require(v_dim <= dim, f"values of {v_dim} channels are no part of keys of {dim}")
        return
    native.require(v_cache.dtype is k_cache.dtype, "the pools are of two dtypes")
    native.require(v_cache.shape == (*block, kv_heads, v_dim + extra), "v_cache has other rows than v")
    native.require(v_cache.is_contiguous(), "the pools must be contiguous")


def check_batch(query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
    """Refuse batch inputs of other sizes than the number of sequences.

    Raises:
        ValueError: an input has another dtype or shape, or is not dense.
    """
    sequences = seq_lens.shape[0]
    native.require_vector(query_start, sequences + 1, torch.int32, "query_start")
    native.require_vector(seq_lens, sequences, torch.int32, "seq_lens")
    tables = block_tables.shape[0] == sequences and block_tables.dtype is torch.int32
    native.require(tables and block_tables.is_contiguous(), f"block_tables must be int32 [{sequences}, B]")


def float_or_int8(options: Mapping[str, Any]) -> bool:
    return options.get("kv_dtype", "float32") in ("float32", "int8")


def emit_attention(
    b: Builder,
    q: View,
    k: View,
    v: View,
    k_cache: View,
    v_cache: View | None,
    slot_mapping: View | None,
    query_start: View,
    seq_lens: View,
    block_tables: View,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: View | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Result:
    (heads, dim), (kv_heads, v_dim) = q.shape, v.shape
    out = b.buffer(q.rows, (heads, v_dim))
    values = None if v_cache is None else v
    b.call(
        "attention", q=q, k=k, v=values, k_cache=k_cache, v_cache=v_cache, sinks=sinks, slopes=slopes, out=out,
        slot_mapping=slot_mapping, query_start=query_start, seq_lens=seq_lens, block_tables=block_tables,
        tokens=Size(q.rows), sequences=Size(SEQUENCES), table_width=Size(TABLE_WIDTH), block_size=Size(BLOCK_SIZE),
        q_token=q.row_stride, q_head=dim, k_token=k.row_stride, k_head=dim, v_token=v.row_stride, v_head=v_dim,
        heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, window=window, chunk=chunk, scale=float(scale),
        softcap=float(softcap), sparse_cover=float(sparse_cover), sparse_from=sparse_from,
        int8_cache=k_cache.dtype is torch.int8, positions=positions,
    )  # fmt: skip
    return (out,)


def emit_paged_attention(
    b: Builder,
    q: View,
    k: View,
    v: View,
    k_cache: View,
    v_cache: View | None,
    query_start: View,
    seq_lens: View,
    block_tables: View,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    positions: View | None = None,
    scale: float = 1.0,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Result:
    batch = query_start, seq_lens, block_tables
    options: tuple[Any, ...] = scale, window, softcap, chunk, sparse_cover, sparse_from
    scores: tuple[Any, ...] = sinks, slopes, positions, *options
    return emit_attention(b, q, k, v, k_cache, v_cache, None, *batch, *scores)


def sparse_tiles() -> tuple[int, int]:
    """Tiles of keys that blocks of queries of block-sparse prefill have read so far, and that they could have read."""
    counts = torch.zeros(2, dtype=torch.int64)
    native.library().optkit_sparse_tiles(counts.data_ptr())
    read, seen = counts.tolist()
    return read, seen


KERNELS = tuple(
    Kernel(
        name, "native", function, native.supports, handles=float_or_int8, needs="a float32 or int8 KV cache"
    )
    for name, function in (("attention", attention), ("paged_attention", paged_attention))
)
EMITTERS = (Emitter("attention", emit_attention), Emitter("paged_attention", emit_paged_attention))

"""Attention over selected blocks by optkit's native kernel (selection.cpp): cache write, bounds of keys, choice of the
blocks and attention in a call.

The blocks of a token depend on its query, its position and the keys of its sequence alone, and attention runs by the
kernel of ``attention`` with tables of these blocks. So an output row has the same bits in any batch, and with any
number of threads. AVX-512 and AVX2 give the same bits too; the portable variant rounds otherwise, and may choose
another block where two are equal up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.kernels.cpu.attention import address, check, check_batch, float_or_int8, native_types
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import BLOCK_SIZE, SEQUENCES, TABLE_WIDTH, Builder, Size, View
from optkit.kernels.kernel import Kernel


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
    """See ``reference.selected_attention``. q, k and v may have any strides; float32 (else the reference runs).

    Raises:
        ValueError: a tensor has another dtype or shape than the kernel would read or write.
    """
    if not native_types(q, k_cache):
        return reference.selected_attention(
            q, k, v, k_cache, v_cache, k_bounds, slot_mapping, query_start, seq_lens, block_tables, prompt_lens, sinks,
            scale=scale, softcap=softcap, budget=budget, min_context=min_context, sparse_cover=sparse_cover,
            sparse_from=sparse_from,
        )  # fmt: skip
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[1], v.shape[2]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    check(q, k, v, k_cache, v_cache)
    check_batch(query_start, seq_lens, block_tables)
    native.require_vector(slot_mapping, tokens, torch.int64, "slot_mapping")
    native.require_vector(prompt_lens, seq_lens.shape[0], torch.int32, "prompt_lens")
    wanted = (*k_cache.shape[:2], reference.bounds_token_bytes(kv_heads, dim))
    native.require(
        k_bounds.shape == wanted and k_bounds.dtype is torch.int8 and k_bounds.is_contiguous(),
        f"k_bounds must be int8 {list(wanted)}",
    )
    if sinks is not None:
        native.require_vector(sinks, heads, torch.float32, "sinks")
    out = torch.empty((tokens, heads, v_dim))
    native.library().optkit_selected_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_bounds.data_ptr(),
        address(sinks),
        out.data_ptr(),
        slot_mapping.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        prompt_lens.data_ptr(),
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
        scale,
        softcap,
        budget,
        min_context,
        sparse_cover,
        sparse_from,
        k_cache.dtype is torch.int8,
        native.threads(),
    )
    return out


def emit_selected_attention(
    b: Builder,
    q: View,
    k: View,
    v: View,
    k_cache: View,
    v_cache: View,
    k_bounds: View,
    slot_mapping: View,
    query_start: View,
    seq_lens: View,
    block_tables: View,
    prompt_lens: View,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    budget: int,
    min_context: int = 0,
    sparse_cover: float = 0.0,
    sparse_from: int = 0,
) -> Result:
    (heads, dim), (kv_heads, v_dim) = q.shape, v.shape
    out = b.buffer(q.rows, (heads, v_dim))
    b.call(
        "selected_attention", q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, k_bounds=k_bounds, sinks=sinks, out=out,
        slot_mapping=slot_mapping, query_start=query_start, seq_lens=seq_lens, block_tables=block_tables,
        prompt_lens=prompt_lens, tokens=Size(q.rows), sequences=Size(SEQUENCES), table_width=Size(TABLE_WIDTH),
        block_size=Size(BLOCK_SIZE), q_token=q.row_stride, q_head=dim, k_token=k.row_stride, k_head=dim,
        v_token=v.row_stride, v_head=v_dim, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, scale=float(scale),
        softcap=float(softcap), budget=budget, min_context=min_context, sparse_cover=float(sparse_cover),
        sparse_from=sparse_from, int8_cache=k_cache.dtype is torch.int8,
    )  # fmt: skip
    return (out,)


KERNELS = (
    Kernel(
        "selected_attention",
        "native",
        selected_attention,
        native.supports,
        handles=float_or_int8,
        needs="a float32 or int8 KV cache",
    ),
)
EMITTERS = (Emitter("selected_attention", emit_selected_attention),)

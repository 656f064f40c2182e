"""Records of rotary embedding and attention over the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph.ops.operands import (
    MAX_INT,
    Kind,
    Number,
    Role,
    batch,
    either,
    expect,
    optional,
    pool,
    value,
    weight,
    whole,
)
from optkit.graph.ops.record import CPU, CUDA, PROGRAM, Op, Sharding, Work
from optkit.kernels import reference
from optkit.kernels.kv_rows import KV_SCALE_BYTES

ATTENTION = (reference.attention, reference.paged_attention)
ROW_MAJOR = torch.contiguous_format
MAX_HEAD_CHANNELS = 1 << 22  # of all heads of a token: attention keeps so many floats for a thread

Q, K, V = (
    value(*of)
    for of in (("q", Kind.COMPUTE, "T H D"), ("k", Kind.COMPUTE, "T J D"), ("v", Kind.COMPUTE, "T J E"))
)
ANGLES = (value("cos", Kind.COMPUTE, "T R", Role.TABLE), value("sin", Kind.COMPUTE, "T R", Role.TABLE))
POOLS = (pool("k_cache"), pool("v_cache"))
POOLS_OR_LATENT = (POOLS[0], optional(POOLS[1]))
SLOTS = batch("slot_mapping", Kind.INT64, "T")
SEQUENCES = (
    batch("query_start", Kind.INT32, "S+1"),
    batch("seq_lens", Kind.INT32, "S"),
    batch("block_tables", Kind.INT32, "S B"),
)
SCORES = (
    optional(weight("sinks", Kind.FLOAT32, "H", Role.TABLE)),
    optional(weight("slopes", Kind.FLOAT32, "H", Role.TABLE)),
    optional(batch("positions", Kind.INT64, "T")),
    Number("scale", required=True),
    whole("window", 0, MAX_INT),
    Number("softcap", 0.0),
    whole("chunk", 0, MAX_INT),
    Number("sparse_cover", 0.0),
    whole("sparse_from", 0, MAX_INT),
)
ONE_CALL = "on a CPU ``attention`` writes the cache and attends in one call"


def visible(node: fx.Node) -> int:
    """The largest number of tokens seen by a token of an attention op, by window and chunk; 0 for all."""
    return min((length for name in ("window", "chunk") if (length := node.kwargs.get(name, 0))), default=0)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    expect(x.ndim == 3 and x.shape[2] % 2 == 0, "rope turns [T, H, D] with an even D")
    table = (x.shape[0], x.shape[2])
    expect(tuple(cos.shape) == tuple(sin.shape) == table, f"cosines and sines must be {list(table)}")
    return torch.empty_like(x, memory_format=ROW_MAJOR)


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None, *rest: Any, **options: Any
) -> Tensor:
    check_heads(q, k)
    check_pool(k, k_cache, "k_cache")
    if v_cache is None:
        expect(
            v.shape[2] <= k.shape[2], f"values of {v.shape[2]} channels are no part of keys of {k.shape[2]}"
        )
    else:
        check_pool(v, v_cache, "v_cache")
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    check_heads(q, k)
    check_pool(k, k_cache, "k_cache")
    check_pool(v, v_cache, "v_cache")
    rotary = cos.shape[1]
    expect(
        rotary % 2 == 0 and rotary <= q.shape[2], f"{rotary} channels of heads of {q.shape[2]} can't rotate"
    )
    return torch.empty_like(q, memory_format=ROW_MAJOR), torch.empty_like(k, memory_format=ROW_MAJOR)


def check_heads(q: Tensor, k: Tensor) -> None:
    reference.heads_per_key(q.shape[1], k.shape[1])
    expect(
        q.shape[1] * q.shape[2] <= MAX_HEAD_CHANNELS,
        f"heads of more than {MAX_HEAD_CHANNELS} channels in all",
    )


def check_pool(rows: Tensor, cache: Tensor, name: str) -> None:
    """Compare a pool with the heads and channels of ``rows``, plus the bytes of a scale where the pool is quantized."""
    extra = KV_SCALE_BYTES if cache.dtype in reference.KV_CODES else 0
    wanted = [rows.shape[1], rows.shape[2] + extra]
    expect(list(cache.shape[2:]) == wanted, f"{name} has rows of {list(cache.shape[2:])}, not {wanted}")


OPS = (
    Op(
        reference.rope_table,
        (
            value("positions", Kind.INT64, "T"),
            either("inv_freq", Kind.FLOAT32, "R", Role.TABLE),
            Number("scale"),
        ),
        shape=reference.rope_table,
        work=Work.POINTWISE,
        absent={CUDA: "one small table a step, which torch computes"},
        compiled=True,
    ),
    Op(
        reference.rope,
        (value("x", Kind.COMPUTE, "T H R"), *ANGLES),
        shape=rope,
        work=Work.POINTWISE,
        absent={CUDA: "on a GPU rope_kv_write rotates q and k"},
        row_wise=True,
        per_head=True,
        compiled=True,
    ),
    Op(
        reference.attention,
        (Q, K, V, *POOLS_OR_LATENT, SLOTS, *SEQUENCES, *SCORES),
        shape=attention,
        work=Work.ATTENTION,
        traceable=False,
        mutates=("k_cache", "v_cache"),
        sharding=Sharding.HEADS,
    ),
    Op(
        reference.rope_kv_write,
        (Q, K, V, *ANGLES, *POOLS, SLOTS),
        shape=rope_kv_write,
        work=Work.POINTWISE,
        absent={CPU: ONE_CALL, PROGRAM: ONE_CALL},
        traceable=False,
        mutates=("k_cache", "v_cache"),
        only_lowered=True,
    ),
    Op(
        reference.paged_attention,
        (Q, K, V, *POOLS_OR_LATENT, *SEQUENCES, *SCORES),
        shape=attention,
        work=Work.ATTENTION,
        traceable=False,
        sharding=Sharding.HEADS,
    ),
)

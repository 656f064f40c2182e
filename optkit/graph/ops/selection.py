"""The record of attention over selected blocks of the KV cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optkit.graph.ops import attention
from optkit.graph.ops.attention import POOLS, SEQUENCES, SLOTS, K, Q, V
from optkit.graph.ops.operands import (
    MAX_INT,
    Kind,
    Number,
    Role,
    batch,
    bounds,
    expect,
    optional,
    weight,
    whole,
)
from optkit.graph.ops.record import CUDA, Op, Sharding, Work
from optkit.kernels import reference

MAX_SELECTED_DIM = 4096  # channels of a head: sums of more products may not fit 32 bits
ON_GPU = "the choice of blocks is written for CPUs; on a GPU the pass skips every layer"


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_bounds: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    size = reference.bounds_token_bytes(k.shape[1], k.shape[2])
    expect(k_bounds.shape[2] == size, f"k_bounds has {k_bounds.shape[2]} bytes a token, not {size}")
    expect(q.shape[2] <= MAX_SELECTED_DIM, f"heads of more than {MAX_SELECTED_DIM} channels")
    return attention.attention(q, k, v, k_cache, v_cache)


OPS = (
    Op(
        reference.selected_attention,
        (
            Q,
            K,
            V,
            *POOLS,
            bounds("k_bounds"),
            SLOTS,
            *SEQUENCES,
            batch("prompt_lens", Kind.INT32, "S"),
            optional(weight("sinks", Kind.FLOAT32, "H", Role.TABLE)),
            Number("scale", required=True),
            Number("softcap", 0.0),
            whole("budget", 1, MAX_INT, required=True),
            whole("min_context", 0, MAX_INT),
            Number("sparse_cover", 0.0),
            whole("sparse_from", 0, MAX_INT),
        ),
        shape=selected_attention,
        work=Work.ATTENTION,
        absent={CUDA: ON_GPU},
        traceable=False,
        mutates=("k_cache", "v_cache", "k_bounds"),
        sharding=Sharding.HEADS,
    ),
)

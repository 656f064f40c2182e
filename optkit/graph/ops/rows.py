"""Records of ops on whole rows: embeddings, rows with logits, and the variant of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.graph.ops.linear import GROUP_SCALE, INT8_WEIGHT
from optkit.graph.ops.operands import MAX_INT, Kind, batch, either, expect, value, whole
from optkit.graph.ops.record import CPU, CUDA, PROGRAM, Op, Sharding, Work
from optkit.kernels import reference

TORCH = "torch copies the rows"


def by_tokens(few: Tensor, many: Tensor, positions: Tensor, limit: int) -> Tensor:
    expect(few.shape == many.shape and few.dtype == many.dtype, "variants of a layer must give alike tensors")
    expect(positions.ndim == 1 and type(limit) is int and limit > 0, "a limit is a number of tokens")
    return torch.empty_like(few, memory_format=torch.contiguous_format)


def embedding_w8(ids: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    rows, channels = weight.shape
    expect(weight_scale.ndim == 2 and weight_scale.shape[0] == rows, f"weight scales must be [{rows}, G]")
    groups = weight_scale.shape[1]
    expect(groups > 0 and channels % groups == 0, f"{channels} channels, {groups} groups")
    return torch.empty((ids.shape[0], channels), dtype=torch.float32, device=ids.device)


OPS = (
    Op(
        reference.embedding,
        (either("weight", Kind.COMPUTE, "V K"), value("ids", Kind.INT64, "T")),
        shape=reference.embedding,
        work=Work.GATHER,
        absent={CPU: TORCH, CUDA: TORCH},
        any_dtype=True,
        compiled=True,
        sharding=Sharding.VOCABULARY,
    ),
    Op(
        reference.embedding_w8,
        (value("ids", Kind.INT64, "T"), INT8_WEIGHT, GROUP_SCALE),
        shape=embedding_w8,
        work=Work.GATHER,
        absent={CUDA: "torch copies the rows and multiplies"},
        sharding=Sharding.VOCABULARY,
    ),
    Op(
        reference.select_rows,
        (value("x", Kind.COMPUTE, "T ..."), batch("index", Kind.INT64, "L")),
        shape=reference.select_rows,
        work=Work.POINTWISE,
        absent={CPU: TORCH, CUDA: TORCH},
        any_dtype=True,
        compiled=True,
        inputs={"index": "logits_index"},
        sharding=Sharding.CHANNELS,
    ),
    Op(
        reference.by_tokens,
        (
            value("few", Kind.COMPUTE, "..."),
            value("many", Kind.COMPUTE, "..."),
            batch("positions", Kind.INT64, "T"),
            whole("limit", 1, MAX_INT, required=True),
        ),
        shape=by_tokens,
        work=Work.POINTWISE,
        absent=dict.fromkeys((CPU, CUDA, PROGRAM), "lowering keeps one of the two variants"),
        row_wise=True,
        sharding=Sharding.CHANNELS,
    ),
)

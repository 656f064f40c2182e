"""Records of the ops in the graph of one rank: exchange with the other ranks, and int8 layers in exact parts."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.graph.ops.linear import INT8_WEIGHT
from optkit.graph.ops.operands import (
    BIAS,
    MAX_INT,
    ROWS_X,
    Choice,
    Kind,
    Role,
    expect,
    optional,
    value,
    weight,
    whole,
)
from optkit.graph.ops.record import CPU, CUDA, PROGRAM, Op, Work
from optkit.kernels import reference
from optkit.kernels.collectives import REDUCTIONS

DISTRIBUTED = "torch.distributed exchanges tensors of GPUs, by NCCL"
ON_HOST = "int8 layers on a GPU exchange activations, not sums"


def all_gather(x: Tensor, total: int, unit: int = 1) -> Tensor:
    expect(total % unit == 0, f"{total} columns are no whole units of {unit}")
    expect(x.shape[-1] <= total + 1, f"a share of {x.shape[-1]} columns of {total}")
    return x.new_empty((*x.shape[:-1], total))


def all_gather_quantized(
    q: Tensor, scale: Tensor, total: int, unit: int = 1, groups: int = 1
) -> tuple[Tensor, Tensor]:
    expect(
        total % groups == 0 and unit * groups % total == 0, f"{groups} groups in units of {unit} of {total}"
    )
    return all_gather(q, total, unit), all_gather(scale, groups, unit * groups // total)


def broadcast(rows: Tensor, x: Tensor | None, after: Tensor | None, width: int, source: int) -> Tensor:
    expect(x is None or x.shape == (len(rows), width), f"the rank {source} gives [{len(rows)}, {width}]")
    return torch.empty((len(rows), width), dtype=torch.float32, device=rows.device)


def quantize_by(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device), torch.empty_like(most)


def int8_sums(q: Tensor, weight: Tensor) -> Tensor:
    expect(q.shape[1] == weight.shape[1], f"int8 weights must be [N, {q.shape[1]}]")
    return torch.empty((q.shape[0], weight.shape[0]), dtype=torch.int32, device=q.device)


def dequantize_sums(sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.empty(sums.shape, dtype=torch.float32, device=sums.device)


OPS = (
    Op(
        reference.local_ids,
        (
            value("ids", Kind.INT64, "T"),
            whole("first", 0, MAX_INT, required=True),
            whole("rows", 1, MAX_INT, required=True),
        ),
        shape=reference.local_ids,
        work=Work.POINTWISE,
        absent=dict.fromkeys((CPU, CUDA, PROGRAM), "torch compares a number a token"),
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.all_reduce,
        (value("x", Kind.SUMS, "..."), Choice("op", REDUCTIONS)),
        shape=reference.all_reduce,
        work=Work.POINTWISE,
        absent={CUDA: DISTRIBUTED},
        only_lowered=True,
    ),
    Op(
        reference.all_gather,
        (
            value("x", Kind.COLUMNS, "... C"),
            whole("total", 1, MAX_INT, required=True),
            whole("unit", 1, MAX_INT),
        ),
        shape=all_gather,
        work=Work.POINTWISE,
        absent={CUDA: DISTRIBUTED},
        only_lowered=True,
    ),
    Op(
        reference.all_gather_quantized,
        (
            value("q", Kind.UINT8, "T C"),
            value("scale", Kind.FLOAT32, "T G", Role.ACTIVATION_SCALE),
            whole("total", 1, MAX_INT, required=True),
            whole("unit", 1, MAX_INT),
            whole("groups", 1, MAX_INT),
        ),
        shape=all_gather_quantized,
        work=Work.POINTWISE,
        absent={CUDA: DISTRIBUTED},
        only_lowered=True,
    ),
    Op(
        reference.broadcast,
        (
            value("rows", Kind.INT64, "L", Role.BATCH),
            optional(value("x", Kind.FLOAT32, "L C")),
            optional(value("after", Kind.FLOAT32, "T K", Role.BATCH)),
            whole("width", 1, MAX_INT, required=True),
            whole("source", 0, MAX_INT, required=True),
        ),
        shape=broadcast,
        work=Work.POINTWISE,
        absent={CUDA: DISTRIBUTED},
        only_lowered=True,
    ),
    Op(
        reference.absmax_per_token,
        (ROWS_X,),
        shape=reference.absmax_per_token,
        work=Work.POINTWISE,
        absent={CUDA: ON_HOST},
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.quantize_by,
        (ROWS_X, value("most", Kind.FLOAT32, "T 1", Role.ACTIVATION_SCALE)),
        shape=quantize_by,
        work=Work.POINTWISE,
        absent={CUDA: ON_HOST},
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.int8_sums,
        (value("q", Kind.UINT8, "T K"), INT8_WEIGHT),
        shape=int8_sums,
        work=Work.LINEAR_8BIT,
        absent={CUDA: ON_HOST},
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.dequantize_sums,
        (
            value("sums", Kind.INT32, "T N"),
            value("scale", Kind.FLOAT32, "T 1", Role.ACTIVATION_SCALE),
            weight("weight_scale", Kind.FLOAT, "N 1", Role.WEIGHT_SCALE),
            BIAS,
        ),
        shape=dequantize_sums,
        work=Work.POINTWISE,
        absent={CUDA: ON_HOST},
        row_wise=True,
        only_lowered=True,
    ),
)

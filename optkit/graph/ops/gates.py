"""Records of activations: gated on two operands, on the halves of a stacked operand, quantized; and softplus."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.graph.ops.norms import FMT, GPU_ONLY, quantized
from optkit.graph.ops.operands import Choice, Kind, Role, X, either, expect, optional, value
from optkit.graph.ops.record import CUDA, Op, Sharding, Work
from optkit.kernels import reference

GATE, UP = value("gate", Kind.COMPUTE, "..."), value("up", Kind.COMPUTE, "...")
GATE_UP, ROWS_GATE_UP = value("gate_up", Kind.COMPUTE, "... F"), value("gate_up", Kind.COMPUTE, "T F")
GELU = Choice("approximate", ("none", "tanh"))


def gated(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    expect(gate.shape == up.shape, "gate and up must have the same shape")
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def gated_packed(gate_up: Tensor, approximate: str = "none") -> Tensor:
    expect(gate_up.shape[-1] % 2 == 0, "gate and up must be halves")
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def gated_quantize(gate_up: Tensor, fmt: str = "int8", approximate: str = "none") -> tuple[Tensor, Tensor]:
    return quantized(gate_up, gated_packed(gate_up).shape[1], fmt)


def softplus(x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


OPS = (
    Op(
        reference.softplus,
        (X, optional(either("bias", Kind.COMPUTE, "K", Role.BIAS))),
        shape=softplus,
        work=Work.POINTWISE,
        absent={CUDA: "torch's own sum and softplus"},
        row_wise=True,
        per_head=True,
        compiled=True,
        sharding=Sharding.CHANNELS,
    ),
    Op(
        reference.silu_mul,
        (GATE, UP),
        shape=gated,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        packed=reference.silu_mul_packed,
        sharding=Sharding.CHANNELS,
    ),
    Op(
        reference.gelu_mul,
        (GATE, UP, GELU),
        shape=gated,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        packed=reference.gelu_mul_packed,
        sharding=Sharding.CHANNELS,
    ),
    Op(
        reference.silu_mul_packed,
        (GATE_UP,),
        shape=gated_packed,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        quantized=reference.silu_mul_quantize,
        sharding=Sharding.HALVES,
    ),
    Op(
        reference.gelu_mul_packed,
        (GATE_UP, GELU),
        shape=gated_packed,
        work=Work.POINTWISE,
        row_wise=True,
        compiled=True,
        quantized=reference.gelu_mul_quantize,
        sharding=Sharding.HALVES,
    ),
    Op(
        reference.silu_mul_quantize,
        (ROWS_GATE_UP, FMT),
        shape=gated_quantize,
        work=Work.POINTWISE,
        absent=GPU_ONLY,
        row_wise=True,
        only_lowered=True,
    ),
    Op(
        reference.gelu_mul_quantize,
        (ROWS_GATE_UP, FMT, GELU),
        shape=gated_quantize,
        work=Work.POINTWISE,
        absent=GPU_ONLY,
        row_wise=True,
        only_lowered=True,
    ),
)

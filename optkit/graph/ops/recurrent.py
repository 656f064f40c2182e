"""Records of ops with a recurrent state: short convolutions, the gated delta rule, selective state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optkit.graph.ops.operands import (
    Choice,
    Kind,
    Number,
    Operand,
    Role,
    TensorOperand,
    batch,
    either,
    expect,
    optional,
    state,
    value,
    weight,
)
from optkit.graph.ops.record import CUDA, Op, Work
from optkit.kernels import reference

MAX_TAPS = 64
MAX_KEY_CHANNELS = 1024  # of a head: kernels keep so many rows of a state close to the processor

WHOLE_STATES = "recurrent states are not shared by ranks"
UNWRITTEN = {CUDA: "no GPU kernel is written: the reference runs, token by token"}
SEQUENCES = (
    batch("query_start", Kind.INT32, "S+1"),
    batch("seq_lens", Kind.INT32, "S"),
    batch("state_slots", Kind.INT32, "S"),
)


def short_conv(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
    expect(weight.shape[2] <= MAX_TAPS, f"convolutions are of at most {MAX_TAPS} taps")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **options: Any) -> Tensor:
    check_keys(v.shape[1], *k.shape[1:])
    expect(
        g.ndim == 2 or list(g.shape[2:]) == [k.shape[2]], "decay is of heads, or of the channels of the keys"
    )
    return v.new_empty(v.shape, dtype=q.dtype)


def ssd_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any) -> Tensor:
    check_keys(x.shape[1], *B.shape[1:])
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def selective_scan(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_keys(heads: int, key_heads: int, channels: int) -> None:
    reference.heads_per_key(heads, key_heads)
    expect(channels <= MAX_KEY_CHANNELS, f"keys are of at most {MAX_KEY_CHANNELS} channels")


def per_channel(name: str, shape: str, role: Role = Role.TABLE) -> TensorOperand:
    """A float32 tensor of heads or channels, which capture computes from weights where it does not fold it."""
    return either(name, Kind.FLOAT32, shape, role)


def of_states(
    spec: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    tokens: tuple[TensorOperand, ...],
    pool: TensorOperand,
    *options: Operand,
) -> Op:
    """The record of an op on ``tokens`` that updates the states of the batch's sequences in ``pool``."""
    return Op(
        spec,
        (*tokens, pool, *SEQUENCES, *options),
        shape=shape,
        work=Work.RECURRENT,
        absent=UNWRITTEN,
        traceable=False,
        mutates=(pool.name,),
        unshared=WHOLE_STATES,
    )


OPS = (
    of_states(
        reference.short_conv,
        short_conv,
        (
            value("x", Kind.COMPUTE, "T C"),
            weight("weight", Kind.COMPUTE, "C 1 P+1"),
            optional(weight("bias", Kind.COMPUTE, "C", Role.BIAS)),
        ),
        state("conv_state", "P C", Kind.FLOAT32),
        Choice("activation", reference.ACTIVATIONS),
    ),
    of_states(
        reference.gated_delta_rule,
        gated_delta_rule,
        (
            value("q", Kind.COMPUTE, "T J D"),
            value("k", Kind.COMPUTE, "T J D"),
            value("v", Kind.COMPUTE, "T H E"),
            value("g", Kind.FLOAT32, "T H ..."),
            value("beta", Kind.COMPUTE, "T H"),
        ),
        state("recurrent_state", "H D E", Kind.FLOAT32),
        Number("scale", required=True),
        Choice("l2norm", (0, 1)),
    ),
    of_states(
        reference.ssd_scan,
        ssd_scan,
        (
            value("x", Kind.COMPUTE, "T H E"),
            value("dt", Kind.FLOAT32, "T H"),
            per_channel("A", "H"),
            value("B", Kind.COMPUTE, "T J D"),
            value("C", Kind.COMPUTE, "T J D"),
            optional(per_channel("D", "H")),
        ),
        state("ssm_state", "H D E", Kind.FLOAT32),
    ),
    of_states(
        reference.selective_scan,
        selective_scan,
        (
            value("x", Kind.COMPUTE, "T C"),
            value("dt", Kind.FLOAT32, "T C"),
            per_channel("A", "D C"),
            value("B", Kind.COMPUTE, "T D"),
            value("C", Kind.COMPUTE, "T D"),
            optional(per_channel("D", "C")),
        ),
        state("ssm_state", "D C", Kind.FLOAT32),
    ),
)

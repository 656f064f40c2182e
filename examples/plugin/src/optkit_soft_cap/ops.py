"""The op ``soft_cap.soft_cap``: the reference, the record, and a kernel for CPUs.

The reference is the specification, in plain PyTorch. The kernel has the same parameters and gives the same numbers, in
one buffer where the reference has three: at a vocabulary of 256,000 a row of logits is a megabyte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.graph.ops.operands import Kind, Number, value
from optkit.graph.ops.record import Op, Work
from optkit.kernels.kernel import Kernel


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) * cap, [...] float."""
    return torch.tanh(x / cap) * cap


def shape(x: Tensor, cap: float) -> Tensor:
    """The result on the meta device."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def soft_cap_in_place(x: Tensor, cap: float) -> Tensor:
    """``soft_cap`` in the buffer of the quotient."""
    return (x / cap).tanh_().mul_(cap)


OPS = (
    Op(
        soft_cap,
        (value("x", Kind.COMPUTE, "..."), Number("cap", low=1e-6, required=True)),
        shape=shape,
        work=Work.POINTWISE,
        row_wise=True,
        any_dtype=True,
    ),
)
KERNELS = {"cpu": (Kernel("soft_cap", "in_place", soft_cap_in_place, supports=lambda target: True),)}

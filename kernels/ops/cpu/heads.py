"""Linear layers of heads by optkit's native kernel (heads.cpp), in float32.

The matrix of a head is packed to [k, n], whichever way round the op reads the weight. In a program the op keeps the
calls before and after in one native call. Alone the kernel is as fast as ``torch.bmm`` on tiny heads and single tokens,
and 1.2 to 2.4 times as fast elsewhere (docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cpu import native, weight_memory
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Builder, Size, View
from optkit.kernels.kernel import Kernel


def pack(weights: dict[int, Tensor], options: Mapping[str, Any]) -> dict[int, Tensor]:
    """Argument 1, the weight [H * R, K], as the matrices [H, k, n] that multiply activations [k] from the right."""
    first, last = options["first"], options["last"]
    matrices = weights[1].unflatten(0, (options["num_heads"], -1))[:, first:last]
    matrices = matrices if options.get("transposed") else matrices.transpose(1, 2)
    return {1: weight_memory.zeros(matrices.shape, torch.float32).copy_(matrices)}


def head_linear(
    x: Tensor, weight: Tensor, *, num_heads: int, first: int, last: int, transposed: int = 0
) -> Tensor:
    """See ``reference.head_linear``; ``weight`` is packed."""
    heads, k, n = weight.shape
    native.require(x.dtype is weight.dtype is torch.float32, "activations and weight must be float32")
    native.require(x.shape[1:] == (heads, k), f"activations must be [T, {heads}, {k}]")
    native.require(weight.is_contiguous(), "the weight must be contiguous")
    if x.stride()[1:] != (k, 1):
        x = x.contiguous()
    out = torch.empty((x.shape[0], heads, n))
    native.library().optkit_head_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        heads,
        k,
        n,
        native.threads(),
    )
    return out


def emit_head_linear(
    b: Builder, x: View, weight: Tensor, num_heads: int, first: int, last: int, transposed: int = 0
) -> Result:
    heads, k, n = weight.shape
    out = b.buffer(x.rows, (heads, n))
    b.call(
        "head_linear", by_rows=True,
        x=x, x_token=x.row_stride, weight=weight, out=out, tokens=Size(x.rows), heads=heads, k=k, n=n
    )  # fmt: skip
    return (out,)


def float_weight(weights: dict[int, Tensor]) -> bool:
    return 1 in weights and weights[1].dtype is torch.float32


KERNELS = (
    Kernel(
        "head_linear", "native", head_linear, native.supports, pack, float_weight, needs="a float32 weight"
    ),
)
EMITTERS = (Emitter("head_linear", emit_head_linear),)

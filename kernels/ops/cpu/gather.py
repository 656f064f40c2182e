"""Embedding, selection of rows, sums and products as calls of programs (pointwise.cpp).

Outside of programs torch runs the ops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optkit.kernels.cpu.call_list import LOGITS
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Argument, Builder, Size, View
from optkit.kernels.kernel import Kernel

Operand = View | Tensor | int | float


def emit_embedding(b: Builder, weight: Tensor, ids: View) -> Result:
    return gathered(b, weight, weight.shape[0], ids, ids.rows, weight.shape[1:])


def emit_select_rows(b: Builder, x: View, index: View) -> Result:
    return gathered(b, x, Size(x.rows), index, LOGITS, x.shape)


def gathered(
    b: Builder, table: Argument, count: Argument, index: View, rows: int, shape: tuple[int, ...]
) -> Result:
    """Rows ``index`` of ``table``, which has ``count``; each row has ``shape``."""
    out = b.buffer(rows, shape)
    b.call(
        "gather_rows",
        by_rows=True,
        table=table,
        index=index,
        out=out,
        rows=Size(rows),
        count=count,
        width=out.width,
    )
    return (out,)


def emit_add(b: Builder, left: Operand, right: Operand) -> Result:
    return paired(b, "add", left, right)


def emit_multiply(b: Builder, left: Operand, right: Operand) -> Result:
    return paired(b, "multiply", left, right)


def emit_divide(b: Builder, left: View, right: int | float) -> Result:
    """A quotient by a power of two, the product with the reciprocal to the bit."""
    if not has_exact_reciprocal(right):
        raise NotImplementedError("a quotient by a number other than a power of two")
    return paired(b, "multiply", left, 1 / right)


def has_exact_reciprocal(number: float) -> bool:
    """True for powers of two that are normal float32 numbers, as their reciprocals are."""
    mantissa, exponent = math.frexp(abs(number))
    return mantissa == 0.5 and abs(exponent) < 126


def paired(b: Builder, name: str, left: Operand, right: Operand) -> Result:
    """Sums or products of two views, or of a view and a vector as long as a row, or a number."""
    if not isinstance(left, View):
        left, right = right, left
    assert isinstance(left, View)
    if isinstance(right, int | float):
        right = torch.full((left.width,), right, dtype=torch.float32)  # rounded as by torch
    elif isinstance(right, Tensor) and right.numel() == 1:
        right = right.reshape(1).repeat(left.width)
    out = b.buffer(left.rows, left.shape)
    b.call(
        name, by_rows=True, a=left, b=right, out=out, rows=Size(left.rows), width=left.width, a_stride=left.row_stride,
        b_stride=right.row_stride if isinstance(right, View) else 0,
    )  # fmt: skip
    return (out,)


KERNELS: tuple[Kernel, ...] = ()
EMITTERS = (
    Emitter("embedding", emit_embedding),
    Emitter("select_rows", emit_select_rows),
    Emitter("aten.add.Tensor", emit_add),
    Emitter("aten.mul.Tensor", emit_multiply),
    Emitter("aten.div.Tensor", emit_divide),
)

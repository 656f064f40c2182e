"""Embedding, selection of rows, sums and products as calls of programs (pointwise.cpp).

Outside of programs torch runs the ops.
"""

from __future__ import annotations

from torch import Tensor

from optkit.kernels.cpu.call_list import LOGITS
from optkit.kernels.cpu.emit import Emitter, Result
from optkit.kernels.cpu.program import Argument, Builder, Size, View
from optkit.kernels.kernel import Kernel


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


def emit_add(b: Builder, left: View | Tensor, right: View | Tensor) -> Result:
    return paired(b, "add", left, right)


def emit_multiply(b: Builder, left: View | Tensor, right: View | Tensor) -> Result:
    return paired(b, "multiply", left, right)


def paired(b: Builder, name: str, left: View | Tensor, right: View | Tensor) -> Result:
    """Sums or products of two views, or of a view and a vector as long as a row."""
    if not isinstance(left, View):
        left, right = right, left
    assert isinstance(left, View)
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
)

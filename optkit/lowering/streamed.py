"""Ops on weights that stay on disk (``optkit.graph.stored``).

An embedding reads the rows of its ids. A float linear layer reads blocks of rows, one after another, and multiplies
each, by the kernel of the whole matrix: a model larger than memory runs, at the speed of the disk or of the page
cache. Results differ from those of the whole matrix by rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.stored import StoredTensor
from optkit.kernels import reference
from optkit.lowering.bind import kernel_of

if TYPE_CHECKING:
    from optkit.machine.target import Target

BLOCK_BYTES = 64 << 20  # of a weight in memory


@dataclass(frozen=True, eq=False)
class StoredEmbedding:
    """``reference.embedding`` of a table on disk."""

    table: StoredTensor
    __name__, __module__ = "stored_embedding", __name__  # for the code that torch.fx generates

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows of the table for ``ids`` [...] int64, as [..., K] in the dtype of the graph."""
        if ids.device.type == "meta":
            return torch.empty((*ids.shape, *self.table.shape[1:]), dtype=self.table.dtype, device="meta")
        (part,) = self.table.parts
        return F.embedding(ids, part.read()).to(self.table.dtype)


@dataclass(frozen=True, eq=False)
class StoredLinear:
    """``reference.linear`` with a weight on disk; ``multiply`` is a kernel of ``linear``, or the reference."""

    weight: StoredTensor
    multiply: Callable[..., Tensor] = reference.linear
    __name__, __module__ = "stored_linear", __name__

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: [..., K] gives [..., N]."""
        rows, columns = self.weight.shape
        out = x.new_empty((*x.shape[:-1], rows))
        if x.device.type == "meta":
            return out
        step = (
            rows if self.weight.transposed else max(1, BLOCK_BYTES // (columns * self.weight.dtype.itemsize))
        )
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            part = None if bias is None else bias[start:stop]
            out[..., start:stop] = self.multiply(x, self.weight.rows(start, stop), part)
        return out


def is_stored_op(node: fx.Node) -> bool:
    """True for a call of an op of this module."""
    return isinstance(node.target, StoredEmbedding | StoredLinear)


def keep_stored(graph: Graph, target: Target | None, *, linears: bool) -> None:
    """Replace embeddings of tables on disk by ``StoredEmbedding``, and float linears by ``StoredLinear``, in place."""
    for node in graph.calls(reference.embedding, reference.linear):
        weight = graph.weight_of(ops.weight(node))
        if weight is None or not isinstance(weight.stored, StoredTensor):
            continue
        stored = weight.stored
        if node.target is reference.linear and linears:
            kernel = kernel_of(graph, node, target)
            node.args = (node.args[0], *node.args[2:])
            node.target = StoredLinear(stored, kernel.fn if kernel else reference.linear)
        elif node.target is reference.embedding and len(stored.parts) == 1 and not stored.transposed:
            node.args = (ops.argument(node, "ids"),)
            node.target = StoredEmbedding(stored)
    graph.prune()

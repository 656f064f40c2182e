"""The heads of attention layers: the projections and reshapes around a call of ``attention``, found on the graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer.

    Attributes:
        reshapes: the reshapes from columns of the query, key and value projections to heads.
        joined: the reshape of attention's result, or of selected rows, back to columns: the input of ``out``.
        projections: the linears before the reshapes: three, or a single stacked linear.
    """

    reshapes: tuple[fx.Node, fx.Node, fx.Node]
    joined: fx.Node
    out: fx.Node
    projections: tuple[fx.Node, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, and the channels of a head in queries and in values."""
        (_, heads, size), (_, groups, _), (_, _, values) = (node.args[1] for node in self.reshapes)
        return heads, groups, size, values


def heads_at(graph: Graph, site: Site) -> Heads:
    """The heads of the layer of a site found by ``check``."""
    attention = ops.activation(site.nodes[0]).args[0]
    if attention.target is reference.select_rows:
        attention = ops.activation(attention)
    found = heads_of(graph, attention)
    assert isinstance(found, Heads)
    return found


def heads_of(graph: Graph, attention: fx.Node) -> Heads | str:
    """The layer around ``attention``, or the reason against pruning the heads."""
    joined = only_user(attention)
    if joined is not None and joined.target is reference.select_rows:
        joined = only_user(joined)
    out = only_user(joined) if joined is not None and joined.target is aten.reshape.default else None
    if (
        joined is None
        or out is None
        or out.target is not reference.linear
        or ops.activation(out) is not joined
    ):
        return "something besides an output projection reads its result"
    reshapes = tuple(split_into_heads(ops.argument(attention, name)) for name in "qkv")
    if None in reshapes:
        return "its heads are not plain columns of projections"
    query, key, value = (node for node in reshapes if node is not None)
    sources = [node.args[0] for node in (query, key, value)]
    projections = projections_of(sources)
    if projections is None:
        return "q, k and v are not three projections, or one for all"
    for linear in (out, *projections):
        weight = graph.weight_of(ops.weight(linear))
        if weight is None or weight.origin is None or weight.dtype != torch.float32:
            return "a weight is not a float32 checkpoint tensor"
        if len(ops.weight(linear).users) > 1:
            return "something else uses one of its weights"
    return Heads((query, key, value), joined, out, projections)


def only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def split_into_heads(node: Any) -> fx.Node | None:
    """The reshape to [T, heads, size] behind an input of attention, through ops on single heads."""
    while isinstance(node, fx.Node) and ops.is_per_head(node.target) and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default or len(node.users) > 1:
        return None
    sizes = node.args[1]
    return node if len(sizes) == 3 and sizes[0] == -1 and all(type(s) is int for s in sizes) else None


def projections_of(sources: Sequence[Any]) -> tuple[fx.Node, ...] | None:
    """The linears with columns ``sources``: three linears, or a single linear split in order."""
    if not all(isinstance(node, fx.Node) and len(node.users) == 1 for node in sources):
        return None
    if all(node.target is reference.linear for node in sources) and len(set(sources)) == 3:
        return tuple(sources)
    if not all(node.target is operator.getitem for node in sources):
        return None
    splits = {node.args[0] for node in sources}
    split = splits.pop()
    in_order = [node.args[1] for node in sources] == [0, 1, 2] and not splits and len(split.users) == 3
    if not in_order or split.target is not aten.split_with_sizes.default or split.args[2:] != (-1,):
        return None
    linear = split.args[0]
    return (linear,) if linear.target is reference.linear and len(linear.users) == 1 else None

"""Rewrites that take transposes out of a captured graph: views by themselves, and in the way of idioms and programs.

A model may compute on columns, [C, T], or on heads, [H, T, D]; kernels take rows, a row a token.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from optkit.capture.nodes import emit, is_call, is_last_dim, replace
from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.ops.aten import POINTWISE
from optkit.kernels import reference

aten = torch.ops.aten
ELEMENTWISE = {f"aten.{name}" for name in POINTWISE}


def cancel_transposes(graph: Graph) -> int:
    count = 0
    for node in graph.calls(aten.transpose.int):
        source = node.args[0]
        if is_call(source, aten.transpose.int) and set(source.args[1:]) == set(node.args[1:]):
            replace(node, source.args[0])
            count += 1
    return count


def hoist_transposes(graph: Graph) -> int:
    """``transpose(op(x))`` is ``op(transpose(x))`` for ops on the last dimension: meets RoPE's transposes."""
    count = 0
    for node in graph.calls(aten.transpose.int):
        source = node.args[0]
        if set(node.args[1:]) == {0, 1} and is_last_dim_op(source):

            def turned(x: fx.Node, node: fx.Node = node) -> fx.Node:
                new = emit(graph, node, aten.transpose.int, x, 0, 1)
                note_transposed(x, new)
                return new

            inputs = {i for i in source.all_input_nodes if len(i.meta.get("shape", ())) == 3}
            args = fx.map_arg(source.args, lambda a, s=inputs: turned(a) if a in s else a)
            new = emit(graph, node, source.target, *args, **source.kwargs)
            note_transposed(source, new)
            replace(node, new)
            count += 1
    return count


def is_last_dim_op(node: Any) -> bool:
    if len(getattr(node, "meta", {}).get("shape", ())) != 3:
        return False
    if is_call(node, reference.rms_norm, reference.layer_norm):
        return True
    if is_call(node, aten.slice.Tensor, aten.cat.default) and len(node.args) > 1:
        return is_last_dim(node, node.args[1])
    return False


def note_transposed(source: fx.Node, new: fx.Node) -> None:
    a, b, *rest = source.meta["shape"]
    new.meta.update(shape=(b, a, *rest), dtype=source.meta.get("dtype"))


# -- columns ---------------------------------------------------------------------------------------------


def rows_of_columns(graph: Graph) -> int:
    """The transpose of values computed on columns [C, T] from transposed rows: the same computed on the rows [T, C].

    Parts, pointwise ops and products with a weight from the left, as in Mamba's and LFM2's layers.
    """
    count = 0
    for node in graph.calls(aten.transpose.int):
        source = node.args[0]
        if is_turn(node) and not is_call(source, aten.transpose.int) and has_rows(graph, source):
            replace(node, rows(graph, source, node))
            count += 1
    return count


def is_turn(node: Any) -> bool:
    """True for the transpose of a matrix."""
    shape = node.meta.get("shape", ()) if is_call(node, aten.transpose.int) else ()
    return len(shape) == 2 and {dim % 2 for dim in node.args[1:]} == {0, 1}


def has_rows(graph: Graph, node: Any) -> bool:
    """True where ``rows`` has a result for the matrix ``node``."""
    if is_turn(node):
        return True
    if not isinstance(node, fx.Node) or len(node.meta.get("shape", ())) != 2:
        return False
    if is_call(node, operator.getitem):
        return is_split_of_columns(node.args[0]) and has_rows(graph, node.args[0].args[0])
    if len(node.users) > 1:  # another reader would have the columns computed, too
        return False
    if op_name(node.target) in ELEMENTWISE:
        same = all(n.meta.get("shape") == node.meta["shape"] for n in node.all_input_nodes)
        return same and bool(node.all_input_nodes) and all(has_rows(graph, n) for n in node.all_input_nodes)
    return product(graph, node) is not None


def rows(graph: Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """The transposed of ``node``, computed at ``before``."""
    if is_turn(node):
        return node.args[0]
    if is_call(node, operator.getitem):
        split, number = node.args
        new = emit(graph, before, split.target, rows(graph, split.args[0], before), split.args[1], -1)
        out = emit(graph, before, operator.getitem, new, number)
    elif (found := product(graph, node)) is not None:
        weight, x = found
        out = emit(graph, before, reference.linear, rows(graph, x, before), weight)
    else:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: rows(graph, each, before))
        out = emit(graph, before, node.target, *args, **kwargs)
    note_transposed(node, out)
    return out


def is_split_of_columns(node: Any) -> bool:
    """True for parts of the channels [C] of a matrix [C, T]."""
    if not is_call(node, aten.split.Tensor, aten.split_with_sizes.default):
        return False
    return (*node.args[2:], 0)[0] in (0, -2) and not node.kwargs


def product(graph: Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """W and x of ``W @ x`` with a weight W [N, C] and x [C, T], also where the product has a batch of one."""
    if is_call(node, aten.select.int) and node.args[1:] == (0, 0):
        node = node.args[0]
    if not is_call(node, aten.matmul.default) or len(node.users) > 1:
        return None
    left, x = node.args
    if is_call(x, aten.unsqueeze.default) and x.args[1] == 0:
        x = x.args[0]
    weight = graph.weight_of(left)
    is_matrix = weight is not None and weight.stored.ndim == 2
    return (left, x) if is_matrix and has_rows(graph, x) else None

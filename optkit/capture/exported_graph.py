"""Rewrites of an exported graph, before the batch dimension is dropped: new nodes, and tensors filled part by part."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
# Every element of a whole is written, so the first values don't matter; ``export`` makes zeros of unwritten memory.
FULL = {aten.full.default, aten.full_like.default}


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A new call, with its value on fake tensors for shape and dtype."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda a: a.meta["val"]))
    return node


def simplify(graph: fx.Graph) -> None:
    """Write products with a transposed parameter as ``linear``, and permutations of two dimensions as ``transpose``."""
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if (
                node.target is aten.matmul.default
                and (weight := transposed_parameter(node.args[1])) is not None
            ):
                node.replace_all_uses_with(call(graph, aten.linear.default, node.args[0], weight))
            elif node.target is aten.permute.default and len(moved := moved_dims(node)) == 2:
                node.replace_all_uses_with(call(graph, aten.transpose.int, node.args[0], *moved))
    graph.eliminate_dead_code()


def transposed_parameter(node: fx.Node) -> fx.Node | None:
    """W where ``node`` is the transposed of a parameter W [N, K]."""
    swaps = (node.target is aten.permute.default and moved_dims(node) == [0, 1]) or (
        node.target is aten.transpose.int and {dim % 2 for dim in node.args[1:]} == {0, 1}
    )
    if not swaps or node.args[0].op != "placeholder" or node.meta["val"].ndim != 2:
        return None
    return node.args[0]


def moved_dims(permuted: fx.Node) -> list[int]:
    dims = [dim % len(permuted.args[1]) for dim in permuted.args[1]]
    return [dim for dim, source in enumerate(dims) if dim != source]


def join_filled(graph: fx.Graph) -> None:
    """Replace an empty tensor that is filled slice by slice by the ``cat`` of the slices, in place.

    DeepSeek's keys are made so. Slices that leave a part of the tensor empty stay.
    """
    for node in list(graph.nodes):
        if node.target is not aten.slice_scatter.default or is_filled_further(node):
            continue
        parts = slices_of(node)
        if parts is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(call(graph, aten.cat.default, parts, node.args[2]))
    graph.eliminate_dead_code()


def is_filled_further(node: fx.Node) -> bool:
    return any(u.target is aten.slice_scatter.default and u.args[0] is node for u in node.users)


def slices_of(last: fx.Node) -> list[fx.Node] | None:
    """The tensors in the slices of a chain of ``slice_scatter``, in order; None where they are not the whole."""
    dim, size = last.args[2], last.meta["val"].shape[last.args[2]]
    found: dict[int, tuple[int, fx.Node]] = {}
    node = last
    while node.target is aten.slice_scatter.default:
        base, source, at, start, end = (*node.args, None, None)[:5]
        value = source.args[1] if source.target is aten.copy.default else source
        same_shape = value.meta["val"].shape == source.meta["val"].shape
        if at != dim or not same_shape or not all(isinstance(n, int) for n in (start, end, size)):
            return None
        found.setdefault(start, (min(end, size), value))
        node = base
    covered, parts = 0, []
    while covered in found:
        covered, value = found.pop(covered)
        parts.append(value)
    return parts if node.target in FULL and covered == size and not found else None

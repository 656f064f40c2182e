"""Rewrites of an exported graph, before the batch dimension is dropped: new nodes, and tensors filled part by part."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
# Every element of a whole is written, so the first values don't matter; ``export`` makes zeros of unwritten memory.
EMPTY = {aten.full.default, aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default}


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A new call, with its value on fake tensors for shape and dtype."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda a: a.meta["val"]))
    return node


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
    for node in reversed(list(graph.nodes)):
        if node.target in {aten.slice_scatter.default, aten.copy.default, *EMPTY} and not node.users:
            graph.erase_node(node)


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
    return parts if node.target in EMPTY and covered == size and not found else None

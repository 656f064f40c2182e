"""Small helpers of rewrites on nodes of a captured graph, with shapes in ``node.meta``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from optkit.graph.ir import Graph


def replace(old: fx.Node, new: Any) -> None:
    """Make every reader of ``old`` read ``new``; a new node takes over the shape notes of ``old``."""
    if isinstance(new, fx.Node) and "shape" not in new.meta:
        new.meta.update({k: old.meta[k] for k in ("shape", "dtype") if k in old.meta})
    old.replace_all_uses_with(new)


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def operands(node: Any, target: Any, first: Callable[[Any], bool]) -> tuple[Any, Any] | None:
    """The two arguments of a commutative call, in the order of ``first``: the argument with a true result in front."""
    if not is_call(node, target) or len(node.args) < 2:
        return None
    a, b = node.args[0], node.args[1]
    if first(a):
        return a, b
    return (b, a) if first(b) else None


def emit(graph: Graph, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with graph.fx.inserting_before(before):
        return graph.fx.call_function(target, args, kwargs)


def is_last_dim(node: fx.Node, dim: Any) -> bool:
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return len(dims) == 1 and (dims[0] == -1 or dims[0] == len(node.meta.get("shape", ())) - 1)

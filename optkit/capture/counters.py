"""Counts of a call's tokens: fit for indices; as values the tokens' positions take their place.

A graph may hold ``arange`` over the tokens of a call, in the sorting of tokens by experts for example. As a token's
position (Llama 4's attention temperature) the count is wrong in every call but a prompt's first. The export runs a
whole prompt, where count and position are equal, so a count that becomes a floating-point value is replaced by
``positions``. A model that does mean the count differs then in the check of the capture, which runs at late positions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from optkit.capture.canonicalize import aten
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph

ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
INDEXED = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}  # their later arguments are indices


def count_from_positions(graph: Graph) -> bool:
    """Let values read ``positions`` [T] where the model counts the tokens of a prompt; True where any did."""
    replaced = False
    for node in graph.calls(*ARANGES):
        sizes = node.all_input_nodes
        if not (node.target is aten.arange.default and [is_token_count(size) for size in sizes] == [True]):
            continue
        for user in list(node.users):
            if not is_index(node, user) and becomes(user, is_float):
                user.replace_input_with(node, graph.input("positions"))
                replaced = True
    graph.prune()
    return replaced


def is_token_count(node: fx.Node) -> bool:
    """True for the number of tokens of a call."""
    source = node.args[0] if node.target is aten.sym_size.int else None
    return isinstance(source, fx.Node) and source.target in ("input_ids", "positions")


def becomes(node: fx.Node, wanted: Callable[[fx.Node], bool]) -> bool:
    """True where ``node``, or what is computed from it other than by indexing, is ``wanted``."""
    return wanted(node) or any(not is_index(node, user) and becomes(user, wanted) for user in node.users)


def refuse_counters(graph: Graph) -> None:
    """Refuse a graph with a count of the call's tokens as a floating-point value.

    Raises:
        UnsupportedModel: the graph has a count in floating point.
    """
    left = [node for node in graph.calls(*ARANGES) if node.all_input_nodes]
    seen = set(left)
    while left:
        node = left.pop()
        for user in node.users:
            if is_index(node, user) or user in seen:
                continue
            if is_float(user):
                what = "it counts the tokens of a call where it should read their positions"
                raise UnsupportedModel(what, where=graph.meta.model_type)
            seen.add(user)
            left.append(user)


def is_index(node: fx.Node, user: fx.Node) -> bool:
    return user.target in INDEXED and user.args[0] is not node


def is_float(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return dtype is not None and dtype.is_floating_point

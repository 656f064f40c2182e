"""Counts of a call's tokens: fit for indices, not for values.

A graph may hold ``arange`` over the tokens of a call, in the sorting of tokens by experts for example. As a token's
position the count is wrong in every call but a prompt's first. The check of the capture sees an immediate change of
logits. A scale with a change every few thousand tokens (Llama 4's attention temperature) would pass, so the use of a
count as a value is refused.
"""

from __future__ import annotations

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

"""Graphs whose attention depends on the distances between tokens alone.

A sequence may forget the first tokens and go on at any position (``optkit.runtime.kv.rolling``) where no number of the
graph depends on the position of a token: with rotary embedding, with ALiBi, or without any positions.
"""

from __future__ import annotations

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.kernels import reference


def bound_to_positions(graph: Graph) -> str:
    """The reason why sequences of ``graph`` must keep all tokens, in words; empty where the first may be forgotten."""
    if graph.meta.recurrent_specs:
        return "layers have a recurrent state, which is computed from all tokens"
    if any(visible(node) for node in graph.calls(*ATTENTION)):
        return "layers have windows or chunks of their own"
    by_distance = set(graph.calls(*ATTENTION))  # a tree of guesses counts from the first new token
    for node in graph.fx.nodes:
        if node.op == "placeholder" and node.target == "positions":
            other = [u for u in node.users if u not in by_distance and u.target is not reference.rope_table]
            if other:
                return f"{op_name(other[0])} reads the positions themselves, as learned positions do"
    return ""

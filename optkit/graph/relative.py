"""Graphs whose attention depends on the distances between tokens alone.

A sequence may forget the first tokens and go on at any position (``optkit.runtime.kv.rolling``) where no number of the
graph depends on the position of a token: with rotary embedding, with ALiBi, or without any positions.

Attention over selected blocks (``reference.selected_attention``) needs all tokens: a count of the sequence's tokens
finds the end of the prompt, and sinks replace keys without a change of the block's bounds.
"""

from __future__ import annotations

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.ops.attention import ATTENTION, visible
from optkit.graph.states import has_bounds
from optkit.kernels import reference


def bound_to_positions(graph: Graph) -> str:
    """The reason why sequences of ``graph`` must keep all tokens, in words; empty where the first may be forgotten."""
    if graph.meta.recurrent_specs:
        return "layers have a recurrent state, which is computed from all tokens"
    if any(visible(node) for node in graph.calls(*ATTENTION)):
        return "layers have windows or chunks of their own"
    if has_bounds(graph.meta.states):
        return "kv_select counts them from the first one; leave kv_select out of the recipe"
    for node in graph.fx.nodes:
        if node.op == "placeholder" and node.target == "positions":
            other = [user for user in node.users if user.target is not reference.rope_table]
            if other:
                return f"{op_name(other[0])} reads the positions themselves, as learned positions do"
    return ""

"""The graph of hidden states: a graph without the output head."""

from __future__ import annotations

from torch import fx

from optkit.checkpoint.insertion import activation_of
from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.lowering.compiled.plan import PLAN

HEADS = (reference.linear, *ops.QUANTIZED_LINEARS)


def hidden_graph(graph: Graph) -> Graph:
    """``graph`` with the input of the output head as output: [L, hidden size], rows by ``logits_index``.

    Raises:
        UserError: the graph ends with something else than a linear layer and ops on the result.
    """
    hidden = graph.clone()
    hidden.annotations.pop(PLAN, None)  # compiled layers may hold parts of the head
    output = next(node for node in hidden.fx.nodes if node.op == "output")
    output.args = (activation_of(head_of(output.args[0])),)
    hidden.fx.eliminate_dead_code()
    hidden.prune()
    return hidden


def head_of(node: fx.Node) -> fx.Node:
    """The output head behind ``node``, the logits: behind ops such as a soft cap, and the variant for many tokens.

    Raises:
        UserError: there is none.
    """
    while node.target not in HEADS:
        if node.target is reference.by_tokens:
            node = ops.argument(node, "many")
            continue
        before = [n for n in node.all_input_nodes if n.op == "call_function"]
        if len(before) != 1:
            raise UserError(f"the output head can't be found behind {node.name}", where="graph.json")
        (node,) = before
    return node

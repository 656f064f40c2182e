"""select_logits_rows: after the last attention, only the rows with wanted logits are computed.

Capture selects the rows just before the output head. All ops between the last layer's attention and the head work row
by row: the output projection, the norms, the whole feed-forward part. So the selection moves up to the attention's
result, and a prompt of n tokens computes 1 row there instead of n. The gain is a part of a layer, about 0.8 / layers of
a prefill's matrix products; decode has no row to spare. Exact.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.stack import LINEARS

aten = torch.ops.aten

POINTWISE = {aten.add.Tensor, aten.mul.Tensor, aten.relu.default, aten.gelu.default, aten.silu.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


class SelectLogitsRows(Pass):
    name = "select_logits_rows"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for select in graph.calls(reference.select_rows):
            moved = row_by_row_before(select)
            if not any(node.target in LINEARS for node in moved):
                plan.skips.append(Skip(select.name, "no matrix product before it works row by row"))
            else:
                plan.sites.append(Site(select.name, (select, *moved)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for site in plan.sites:
            move_up(graph, *site.nodes)
        return PassResult(len(plan.sites))


def row_by_row_before(select: fx.Node) -> list[fx.Node]:
    """The ops, in order, whose results only reach ``select``, row by row."""
    inside = {select}
    for node in reversed(list(select.graph.nodes)):  # readers come before their inputs
        if node.users and is_row_by_row(node) and all(user in inside for user in node.users):
            inside.add(node)
    inside.remove(select)
    # a part of several results is taken where they are: only tensors have rows to select
    return [
        n
        for n in select.graph.nodes
        if n in inside and (n.target is not operator.getitem or n.args[0] in inside)
    ]


def is_row_by_row(node: fx.Node) -> bool:
    if ops.is_row_wise(node.target) or node.target is operator.getitem:
        return True
    if node.target in POINTWISE:  # a tensor from elsewhere might broadcast along rows
        return all(a.op == "call_function" for a in node.all_input_nodes)
    if node.target in SPLITS:
        return node.args[2:] == (-1,)
    return node.target is aten.reshape.default and node.args[1][0] == -1


def move_up(graph: Graph, select: fx.Node, *after: fx.Node) -> None:
    """Select rows of the outside inputs of the ops ``after``, and remove the old selection."""
    inside, index = set(after), ops.argument(select, "index")
    selected: dict[fx.Node, fx.Node] = {}
    for node in after:
        for value in node.all_input_nodes:
            if value.op == "call_function" and value not in inside:
                if value not in selected:
                    with graph.fx.inserting_after(value):
                        selected[value] = graph.fx.call_function(reference.select_rows, (value, index))
                node.replace_input_with(value, selected[value])
    select.replace_all_uses_with(ops.activation(select))
    graph.fx.erase_node(select)

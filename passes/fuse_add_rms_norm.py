"""fuse_add_rms_norm: a residual addition and the following RMSNorm become a single op.

The sum is needed twice, by the norm and by the next residual. A single kernel writes the sum and normalizes the values
in registers: a pass over memory less, and a dispatch less, per norm. Exact.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage

ADD = torch.ops.aten.add.Tensor


class FuseAddRMSNorm(Pass):
    name = "fuse_add_rms_norm"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.rms_norm):
            name = f"norm {node.name}"
            added = ops.activation(node)
            if not is_residual_add(added):
                plan.skips.append(Skip(name, "its input is not a residual addition"))
            elif sum(user.target is reference.rms_norm for user in added.users) > 1:
                plan.skips.append(Skip(name, "several norms read the same sum"))
            else:
                plan.sites.append(Site(name, (added, node)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for site in plan.sites:
            fuse(graph, *site.nodes)
        graph.prune()
        return PassResult(len(plan.sites))


def is_residual_add(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.target is not ADD or node.kwargs:
        return False
    return all(isinstance(a, fx.Node) and a.op == "call_function" for a in node.args)


def fuse(graph: Graph, added: fx.Node, norm: fx.Node) -> None:
    """Put the fused op in the place of the addition; the norm's weight is the only other operand."""
    residual, x = added.args
    weight = ops.weight(norm)
    if isinstance(weight, fx.Node):
        weight = graph.weight_node(str(weight.target), added)
    with graph.fx.inserting_before(added):
        fused = graph.fx.call_function(
            reference.add_rms_norm, (x, residual, weight, *norm.args[2:]), norm.kwargs
        )
        normed = graph.fx.call_function(operator.getitem, (fused, 0))
        total = graph.fx.call_function(operator.getitem, (fused, 1))
    norm.replace_all_uses_with(normed)
    added.replace_all_uses_with(total)

"""fuse_gate_up: the gate and up projections of a gated MLP become a single matrix product.

``silu(x @ G) * (x @ U)`` reads x once instead of twice, and the activation reads a single buffer. The fusion is exact,
also for the codes of a quantized checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.stack import LINEARS, can_stack, out_features, site_name, stack_linears


class FuseGateUp(Pass):
    name = "fuse_gate_up"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(*ops.GATED):
            reason = why_not(graph, node)
            if reason:
                plan.skips.append(Skip(f"activation {node.name}", reason))
            else:
                plan.sites.append(
                    Site(site_name(graph, ops.argument(node, "gate")).rpartition(".")[0], (node,))
                )
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for site in plan.sites:
            (node,) = site.nodes
            fused = stack_linears(graph, gate_and_up(node), f"{site.name}.gate_up_proj")
            with graph.fx.inserting_before(node):
                packed = graph.fx.call_function(ops.GATED[node.target], (fused, *node.args[2:]), node.kwargs)
            node.replace_all_uses_with(packed)
            graph.prune()
        return PassResult(len(plan.sites))


def gate_and_up(node: fx.Node) -> tuple[Any, Any]:
    return ops.argument(node, "gate"), ops.argument(node, "up")


def why_not(graph: Graph, node: fx.Node) -> str | None:
    gate, up = gate_and_up(node)
    if not all(isinstance(x, fx.Node) and x.target in LINEARS for x in (gate, up)):
        return "gate and up already come from one projection"
    if len(gate.users) > 1 or len(up.users) > 1:
        return "something else reads the gate or up projection"
    if out_features(graph, gate) != out_features(graph, up):
        return "gate and up differ in width"
    return can_stack(graph, (gate, up))

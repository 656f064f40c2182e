"""flash_attention: substitutes the attention kernel that is best for the target.

Capture pins attention to the reference, which builds the whole score matrix. Flash attention (arXiv 2205.14135)
computes the same softmax blockwise and never writes it: memory linear in length, arithmetic in cache. Exact: online
softmax is a reordering of the sum, not an approximation.
"""

from __future__ import annotations

from torch import fx

from optkit.graph.ir import Graph
from optkit.kernels import reference, select
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage


class FlashAttention(Pass):
    name = "flash_attention"
    stage = Stage.ATTENTION

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        kernel = select("attention", ctx.target)
        for node in graph.calls(reference.attention):
            if kernel is None:
                plan.skips.append(Skip(node.name, f"no flash attention kernel for {ctx.target.name}"))
            elif node.kwargs.get("softcap"):
                plan.skips.append(Skip(node.name, f"the {kernel.name} kernel has no soft-cap"))
            else:
                plan.sites.append(Site(node.name, (node,)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        kernel = select("attention", ctx.target)
        if kernel is None:
            return PassResult(0)
        for site in plan.sites:
            node: fx.Node = site.nodes[0]
            node.meta["kernel"] = kernel.name
        return PassResult(len(plan.sites), {"kernel": kernel.name})

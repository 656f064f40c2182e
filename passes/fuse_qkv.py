"""fuse_qkv: the q, k and v projections of a layer become a single matrix product.

Three products with the same input read the input three times and start three kernels; a product of the stacked weights
reads the input once and starts a single kernel. Outputs are column slices. The fusion is exact: every output element is
the same dot product. Quantized layers of a checkpoint are stacked without conversion, codes over codes, where the
formats agree.
"""

from __future__ import annotations

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewriting.stack import (
    LINEARS,
    can_stack,
    out_features,
    site_name,
    split_columns,
    stack_linears,
)

aten = torch.ops.aten
VIEWS = (aten.reshape.default, aten.transpose.int)


class FuseQKV(Pass):
    name = "fuse_qkv"
    stage = Stage.FUSE

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.attention):
            sources = [projection(ops.argument(node, name)) for name in "qkv"]
            name = f"attention {node.name}"
            if None in sources or len(set(sources)) < 3:
                plan.skips.append(Skip(name, "q, k and v are not three separate projections"))
                continue
            linears = tuple(s for s in sources if s is not None)
            reason = can_stack(graph, linears)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(site_name(graph, linears[0]).rpartition(".")[0], linears))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for site in plan.sites:
            ordered = sorted(site.nodes, key=list(graph.fx.nodes).index)
            fused = stack_linears(graph, ordered, f"{site.name}.qkv_proj")
            split_columns(graph, fused, ordered, [out_features(graph, linear) for linear in ordered])
            graph.prune()
        return PassResult(len(plan.sites))


def projection(node: fx.Node) -> fx.Node | None:
    """The linear an attention input comes from, through reshapes, norms and RoPE."""
    while isinstance(node, fx.Node) and (node.target in VIEWS or ops.is_per_head(node.target)):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target in LINEARS else None

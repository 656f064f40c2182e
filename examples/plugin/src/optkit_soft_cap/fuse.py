"""fuse_soft_cap: division, tanh and multiplication by one number become ``soft_cap``."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import fx

from optkit.graph.ir import Graph
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit_soft_cap.ops import soft_cap

aten = torch.ops.aten


class FuseSoftCapConfig(Config):
    min_cap: float = Field(0.0, ge=0, description="leave smaller caps as they are")


class FuseSoftCap(Pass):
    """The fusion is exact: the same operations in the same order."""

    name = "fuse_soft_cap"
    stage = Stage.FUSE
    Config = FuseSoftCapConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for product in graph.calls(aten.mul.Tensor):
            found = chain(product)
            if found is None:
                continue
            if found[-1] < self.config.min_cap:
                plan.skips.append(Skip(product.name, f"its cap {found[-1]} is below min_cap"))
            else:
                plan.sites.append(Site(product.name, (product,)))
        return plan

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        for site in plan.sites:
            (product,) = site.nodes
            x, cap = chain(product)
            with graph.fx.inserting_before(product):
                capped = graph.fx.call_function(soft_cap, (x, cap))
            product.replace_all_uses_with(capped)
        graph.prune()
        return PassResult(len(plan.sites))


def chain(product: fx.Node) -> tuple[fx.Node, float] | None:
    """Input and cap of ``tanh(x / cap) * cap``; None for another product."""
    tanh, cap = product.args
    if not isinstance(cap, float) or cap <= 0 or not called(tanh, aten.tanh.default):
        return None
    quotient: Any = tanh.args[0]
    if not called(quotient, aten.div.Tensor) or quotient.args[1] != cap:
        return None
    return quotient.args[0], cap


def called(node: Any, target: Any) -> bool:
    """True for a call of ``target`` with one reader."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1

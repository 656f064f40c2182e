"""The common part of passes that store the KV cache in fewer bits: the choice of layers, and the change of a layer.

The choice is part of the graph (``KVSpec.dtype``) and of no checkpoint tensor: the Hugging Face directory of the
artifact does not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.states import KVSpec
from optkit.kernels import PLAIN, reference, select
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage


class KVConfig(Config):
    ignore: tuple[int, ...] = Field((), description="layers, counted from 0, whose KV cache stays in float32")


class KVQuantization(Pass):
    """A pass for a KV cache of ``dtype``."""

    stage = Stage.KERNELS
    exact = False
    dtype: ClassVar[str]  # a key of KV_DTYPES
    by_reference: ClassVar[bool] = False  # whether the reference may run it where no kernel does
    Config = KVConfig

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.attention, reference.selected_attention):
            spec = spec_of(graph, node)
            name = f"layer {spec.layer}"
            reason = self.why_not(graph, node, spec, ctx)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        return plan

    def why_not(self, graph: Graph, node: fx.Node, spec: KVSpec, ctx: PassContext) -> str | None:
        if spec.layer in self.config.ignore:
            return "on the ignore list"
        if spec.dtype != "float32":
            return f"its KV cache is {spec.dtype} already"
        sharing = (n for n in graph.calls(*ATTENTION) if spec_of(graph, n) is spec)
        return next((why for n in sharing if (why := self.kernel_lacks(graph, n, ctx))), None)

    def kernel_lacks(self, graph: Graph, node: fx.Node, ctx: PassContext) -> str | None:
        """The reason against pools of the dtype on the target, or None; a pinned kernel must support the dtype."""
        pinned = node.meta.get("kernel")
        options = {**graph.site_options(node), "kv_dtype": self.dtype}
        wanted = None if pinned in (PLAIN, "reference") else pinned
        try:
            kernel = select(ops.op_of(node).name, ctx.target, pinned=wanted, options=options)
        except LookupError:
            return f"its kernel '{pinned}' reads no {self.dtype} KV cache"
        if kernel is None and not self.by_reference:
            return f"no attention kernel reads an {self.dtype} KV cache on {ctx.target.name}"
        return None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        chosen = {spec_of(graph, site.nodes[0]).layer for site in plan.sites}
        before = graph.meta.kv_specs
        after = tuple(replace(spec, dtype=self.dtype) if spec.layer in chosen else spec for spec in before)
        graph.meta = graph.meta.with_kv_specs(after)
        stats = {
            "kv_bytes_per_token_before": sum(spec.token_bytes for spec in before),
            "kv_bytes_per_token_after": sum(spec.token_bytes for spec in after),
        }
        return PassResult(len(plan.sites), stats)


def spec_of(graph: Graph, node: fx.Node) -> KVSpec:
    """The spec of the pools of an attention node."""
    return next(
        spec for spec in graph.meta.kv_specs if f"k_cache_{spec.layer}" == str(ops.argument(node, "k_cache"))
    )

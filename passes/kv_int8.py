"""kv_int8: stores the KV cache in int8, a quarter of the memory and of what decode reads for its context.

Each token and KV head has its own scale for K (after the rotary embedding) and for V: ``absmax / 127``, computed
when the token is written, so nothing is calibrated. K has channels of outliers, and a scale that spanned tokens or
heads would let one of them set the step for all; per token and head the rounding stays far below what int8 weights
cost. Attention reads every token from the cache, the new ones too. The choice is part of the graph
(``KVSpec.dtype``) and of no checkpoint tensor: the Hugging Face directory of the artifact does not change.

A row of D values is D + 4 bytes in place of 4 D: 0.27 of float32 at D = 64.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import fx

from optkit.graph.ir import Graph, KVSpec
from optkit.kernels import reference, select
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage

DTYPE = "int8"


class KVInt8Config(Config):
    ignore: tuple[int, ...] = Field((), description="layers, counted from 0, whose KV cache stays in float32")


class KVInt8(Pass):
    name = "kv_int8"
    stage = Stage.ATTENTION
    exact = False
    Config = KVInt8Config

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.attention):
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
        if spec.dtype == DTYPE:
            return "its KV cache is int8 already"
        return kernel_lacks(graph, node, ctx)

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        chosen = {spec_of(graph, site.nodes[0]).layer for site in plan.sites}
        before = graph.meta.kv_specs
        after = tuple(replace(spec, dtype=DTYPE) if spec.layer in chosen else spec for spec in before)
        graph.meta = replace(graph.meta, kv_specs=after)
        stats = {
            "kv_bytes_per_token_before": sum(spec.token_bytes for spec in before),
            "kv_bytes_per_token_after": sum(spec.token_bytes for spec in after),
        }
        return PassResult(len(plan.sites), stats)


def spec_of(graph: Graph, node: fx.Node) -> KVSpec:
    """The spec of the pools that an attention node reads."""
    return next(spec for spec in graph.meta.kv_specs if f"k_cache_{spec.layer}" == str(node.args[3]))


def kernel_lacks(graph: Graph, node: fx.Node, ctx: PassContext) -> str | None:
    """Why attention can't read int8 pools here, or None. A kernel that a pass has pinned must be able to."""
    pinned = node.meta.get("kernel")
    options = {**graph.site_options(node), "kv_dtype": DTYPE}
    try:
        kernel = select(
            "attention", ctx.target, pinned=None if pinned == "reference" else pinned, options=options
        )
    except LookupError:
        return f"its kernel '{pinned}' reads no int8 KV cache"
    return None if kernel else f"no attention kernel reads an int8 KV cache on {ctx.target.name}"

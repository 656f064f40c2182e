"""int8: linear layers in W8A8, per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets its own symmetric scale, ``absmax / 127``; products accumulate
exactly in int32 and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns,
and of ZeroQuant, arXiv 2206.01861). Compute-bound prefill gains from the int8 units, memory-bound decode from
weights of a quarter the size. Activations that several layers read are quantized once.

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, 1].
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from optkit.kernels import reference, select
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewrite import site_name
from pydantic import Field
from torch import Tensor, fx

from optkit.graph.ir import Graph, Origin, Part, Weight


class Int8Config(Config):
    lm_head: bool = Field(False, description="quantize the output head too")
    ignore: list[str] = Field(
        default_factory=list,
        description="modules to leave in float: exact names, suffixes, or 're:' patterns",
    )


class Int8(Pass):
    name = "int8"
    stage = Stage.QUANTIZE
    exact = False
    Config = Int8Config

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        for node in graph.calls(reference.linear):
            name = site_name(graph, node)
            reason = self.why_not(graph, node, name, ctx)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        for node in graph.calls(reference.grouped_mm):
            plan.skips.append(Skip(f"experts {node.name}", "mixture-of-experts weights stay in float"))
        return plan

    def why_not(self, graph: Graph, node: fx.Node, name: str, ctx: PassContext) -> str | None:
        if name == graph.meta.output_embedding and not self.config.lm_head:
            return "the output head stays in float (lm_head: false)"
        members = [part.name.rpartition(".")[0] for part in origin_of(graph, node)] + [name]
        if any(matches(pattern, member) for pattern in self.config.ignore for member in members):
            return "on the ignore list"
        if select("linear_w8a8", ctx.target) is None:
            return f"no int8 kernel on {ctx.target.name} (needs VNNI)"
        weight = graph.weight_of(node.args[1])
        if weight is None or weight.origin is None or weight.value.dtype != torch.float32:
            return "its weight is not a float32 checkpoint tensor"
        if weight.origin.transposed:
            return "its checkpoint stores the weight transposed, which the int8 format does not express"
        return None

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        quantized: dict[Any, tuple[fx.Node, fx.Node]] = {}
        before = graph.num_bytes()
        for site in plan.sites:
            self.rewrite(graph, site, quantized)
        graph.prune()
        return PassResult(
            len(plan.sites), {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}
        )

    def rewrite(self, graph: Graph, site: Site, quantized: dict[Any, tuple[fx.Node, fx.Node]]) -> None:
        (node,) = site.nodes
        x, weight_node, *bias = node.args
        if x not in quantized:
            quantized[x] = quantize_input(graph, x)
        name = add_weights(graph, str(weight_node.target), site.name)
        weight, scale = (graph.weight_node(n, node) for n in (f"{name}.weight", f"{name}.weight_scale"))
        with graph.fx.inserting_before(node):
            out = graph.fx.call_function(reference.linear_w8a8, (*quantized[x], weight, scale, *bias))
        node.replace_all_uses_with(out)


def quantize_input(graph: Graph, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert the quantization of ``x`` right after it; gives the nodes of q and scale."""
    with graph.fx.inserting_after(x):
        pair = graph.fx.call_function(reference.quantize_per_token, (x,))
    with graph.fx.inserting_after(pair):
        scale = graph.fx.call_function(operator.getitem, (pair, 1))
        q = graph.fx.call_function(operator.getitem, (pair, 0))
    return q, scale


def add_weights(graph: Graph, source: str, site: str) -> str:
    """Register the int8 weight and its scales for module ``site``; a tied embedding itself stays as it is."""
    weight = graph.weights[source]
    origin = weight.origin or Origin(())
    tied = source == graph.meta.input_embedding
    if tied:
        origin = Origin((Part(f"{site}.weight", weight.value.shape[0]),))
    q, scale = quantize_weight(weight.value)
    name = site if tied else source.rpartition(".")[0]
    graph.weights[f"{name}.weight"] = Weight(q, origin)
    graph.weights[f"{name}.weight_scale"] = Weight(scale, origin.renamed(".weight", ".weight_scale"))
    return name


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: weight [N, K] float gives (int8 [N, K], scale [N, 1] float32)."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    return torch.round(weight / scale).clamp_(-127, 127).to(torch.int8), scale.to(torch.float32)


def origin_of(graph: Graph, node: fx.Node) -> tuple[Part, ...]:
    weight = graph.weight_of(node.args[1])
    return weight.origin.parts if weight is not None and weight.origin is not None else ()


def matches(pattern: str, name: str) -> bool:
    """llm-compressor's grammar: ``re:`` patterns match from the start, plain names match whole or as a suffix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern)

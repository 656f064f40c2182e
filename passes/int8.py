"""int8: linear layers in W8A8 (or W8A16), per-channel weights and dynamic per-token activations.

Each weight row and each activation row gets its own symmetric scale, ``absmax / 127``; products accumulate
exactly in int32 and are scaled back once (the scheme of LLM.int8(), arXiv 2208.07339, without outlier columns,
and of ZeroQuant, arXiv 2206.01861). With ``group_size`` every run of so many channels has scales of its own,
which keeps one outlier channel from costing the whole row its resolution. Compute-bound prefill gains from the
int8 units, memory-bound decode from weights of a quarter the size. Activations that several layers read are
quantized once. Layers on the ``weight_only`` list keep their activations (W8A16): right for the output head, whose
few rows cost nothing and whose errors nothing after it forgives.

On disk the weights are compressed-tensors ``int-quantized``: ``weight`` int8 and ``weight_scale`` [N, G].
"""

from __future__ import annotations

import operator
import re
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.kernels import reference, select
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewrite import site_name


class Int8Config(Config):
    lm_head: bool = Field(False, description="quantize the output head too")
    group_size: Literal[0, 32, 64, 128] = Field(
        0, description="channels that share a scale; 0 is one scale a token and output channel"
    )
    weight_only: list[str] = Field(
        default_factory=list,
        description="modules whose activations stay as they are (W8A16): names as in ignore",
    )
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
        if listed(self.config.ignore, graph, node, name):
            return "on the ignore list"
        weight = graph.weight_of(node.args[1])
        if weight is None or weight.origin is None or weight.value.dtype != torch.float32:
            return "its weight is not a float32 checkpoint tensor"
        if weight.origin.transposed:
            return "its checkpoint stores the weight transposed, which the int8 format does not express"
        return self.kernel_lacks(weight.value, listed(self.config.weight_only, graph, node, name), ctx)

    def kernel_lacks(self, weight: Tensor, weight_only: bool, ctx: PassContext) -> str | None:
        """Why no kernel runs this layer in int8 here, or None. Only shapes are looked at."""
        group = self.config.group_size or weight.shape[1]
        if weight.shape[1] % group:
            return f"its {weight.shape[1]} input channels are not a multiple of the group size {group}"
        scales = torch.empty(weight.shape[0], weight.shape[1] // group, device="meta")
        int8 = torch.empty(weight.shape, dtype=torch.int8, device="meta")
        op, position = ("linear_w8a16", 1) if weight_only else ("linear_w8a8", 2)
        if select(op, ctx.target, weights={position: int8, position + 1: scales}) is None:
            groups = f" with groups of {group}" if self.config.group_size else ""
            return f"no int8 kernel{groups} on {ctx.target.name} (optkit doctor says what is missing)"
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
        weight_only = listed(self.config.weight_only, graph, node, site.name)
        if x not in quantized and not weight_only:
            quantized[x] = quantize_input(graph, x, self.config.group_size)
        name = add_weights(graph, str(weight_node.target), site.name, self.config.group_size)
        weight, scale = (graph.weight_node(n, node) for n in (f"{name}.weight", f"{name}.weight_scale"))
        with graph.fx.inserting_before(node):
            if weight_only:
                out = graph.fx.call_function(reference.linear_w8a16, (x, weight, scale, *bias))
            else:
                out = graph.fx.call_function(reference.linear_w8a8, (*quantized[x], weight, scale, *bias))
        node.replace_all_uses_with(out)


def quantize_input(graph: Graph, x: fx.Node, group_size: int) -> tuple[fx.Node, fx.Node]:
    """Insert the quantization of ``x`` right after it; gives the nodes of q and scale."""
    with graph.fx.inserting_after(x):
        pair = graph.fx.call_function(reference.quantize_per_token, (x, group_size))
    with graph.fx.inserting_after(pair):
        scale = graph.fx.call_function(operator.getitem, (pair, 1))
        q = graph.fx.call_function(operator.getitem, (pair, 0))
    return q, scale


def add_weights(graph: Graph, source: str, site: str, group_size: int) -> str:
    """Register the int8 weight and its scales for module ``site``; a tied embedding itself stays as it is."""
    weight = graph.weights[source]
    origin = weight.origin or Origin(())
    tied = source == graph.meta.input_embedding
    if tied:
        origin = Origin((Part(f"{site}.weight", weight.value.shape[0]),))
    q, scale = quantize_weight(weight.value, group_size)
    name = site if tied else source.rpartition(".")[0]
    graph.weights[f"{name}.weight"] = Weight(q, origin)
    graph.weights[f"{name}.weight_scale"] = Weight(scale, origin.renamed(".weight", ".weight_scale"))
    return name


def quantize_weight(weight: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row and group: weight [N, K] float gives (int8 [N, K], scale [N, G] float32).

    G is K / group_size, or 1 when ``group_size`` is 0.
    """
    groups = weight.unflatten(1, (-1, group_size or weight.shape[1])).to(torch.float32)  # [N, G, g]
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    q = torch.round(groups / scale).clamp_(-127, 127).to(torch.int8)
    return q.reshape(weight.shape), scale[..., 0].contiguous()


def origin_of(graph: Graph, node: fx.Node) -> tuple[Part, ...]:
    weight = graph.weight_of(node.args[1])
    return weight.origin.parts if weight is not None and weight.origin is not None else ()


def listed(patterns: list[str], graph: Graph, node: fx.Node, name: str) -> bool:
    """True when one of ``patterns`` names site ``name`` or a module that was fused into it."""
    members = [part.name.rpartition(".")[0] for part in origin_of(graph, node)] + [name]
    return any(matches(pattern, member) for pattern in patterns for member in members)


def matches(pattern: str, name: str) -> bool:
    """llm-compressor's grammar: ``re:`` patterns match from the start, plain names match whole or as a suffix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern)

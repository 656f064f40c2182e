"""The common part of passes that quantize linear layers: the choice of layers, and the change from float to integers.

A subclass names the format of a layer (``formats``) and may choose better codes than rounding does. All subclasses
share the rest. llm-compressor's ``targets`` and ``ignore`` choose the layers. Activations are quantized dynamically,
once for all readers with equal groups. The output head stays float without ``lm_head: true``. A quantized tied head
gets a weight of its own, and the embedding stays float.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit import kernels
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.quantization.experts import ROUTER, SOME_EXPERTS, routers, some_experts
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.quantization.overrides import layer_config
from optkit.passes.quantization.rewriter import QuantizedLinearRewriter, variant_name
from optkit.passes.quantization.targets import (
    LINEAR,
    Patterns,
    check_targets,
    listed,
    matches_any,
    members,
)
from optkit.passes.rewriting.stack import FLOAT_LINEARS, site_name

VARIANTS_SHARE = 0.7  # of the memory, for layers in two variants; the rest is for KV


class LinearQuantizationConfig(Config):
    targets: Patterns = Field(
        default_factory=lambda: [LINEAR],
        min_length=1,
        description="layers to quantize: 'Linear' for all, names, suffixes, or 're:' patterns",
    )
    ignore: Patterns = Field(
        default_factory=list,
        description="modules to leave in float: exact names, suffixes, or 're:' patterns",
    )
    lm_head: bool = Field(False, description="quantize the output head too")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="quantize for steps of up to so many tokens; others keep the layer as it is, for a later pass",
    )


class LinearQuantization(Pass):
    """A pass from ``linear`` to an op on quantized weights."""

    stage = Stage.QUANTIZE
    exact = False
    takes_experts: ClassVar[bool] = True

    @abstractmethod
    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        """The format of ``node``, a linear called ``name``, or the reason against any."""

    def config_for(self, graph: Graph, node: fx.Node) -> Any:
        """The options of linear ``node``, or the reason against the layer, as text."""
        return layer_config(self.config, graph, node)

    def quantize(self, name: str, weight: Tensor, fmt: WeightFormat) -> dict[str, Tensor]:
        """The operands for weight [N, K] of layer ``name``: rounded to nearest, unless overridden."""
        return fmt.round(weight)

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        linears = {node: site_name(graph, node) for node in graph.calls(*FLOAT_LINEARS)}
        choosing = routers(graph)
        check_targets(self.config.targets, graph, linears)
        check_targets(list(getattr(self.config, "overrides", {})), graph, linears, "overrides")
        for node, name in linears.items():
            reason = ROUTER if node in choosing else self.why_not(graph, node, name, ctx)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                limit = self.config.max_tokens
                plan.sites.append(Site(variant_name(name, limit) if limit else name, (node,)))
        reason = self.too_large(graph, plan, ctx)
        return Plan(skips=plan.skips + [Skip(site.name, reason) for site in plan.sites]) if reason else plan

    def too_large(self, graph: Graph, plan: Plan, ctx: PassContext) -> str | None:
        """The reason against a second variant of the layers, by memory, or None. The other has 8 bits at least."""
        if self.config.max_tokens is None:
            return None
        needed = 0
        for site in plan.sites:
            node, fmt = self.site_format(graph, site)
            n, k = graph.linear_shape(node)
            needed += fmt.num_bytes(n, k) + n * k
        if needed <= VARIANTS_SHARE * ctx.target.memory_bytes:
            return None
        return f"two variants of all layers take {needed / 1e9:.0f} GB, too much for {ctx.target.name}"

    def why_not(self, graph: Graph, node: fx.Node, name: str, ctx: PassContext) -> str | None:
        named = [target for target in self.config.targets if target != LINEAR]
        head = name == graph.meta.output_embedding
        if head and not self.config.lm_head and not listed(named, graph, node, name):
            return "the output head stays in float (lm_head: false)"
        if listed(self.config.ignore, graph, node, name):
            return (
                SOME_EXPERTS if some_experts(self.config.ignore, graph, node, name) else "on the ignore list"
            )
        if LINEAR not in self.config.targets and not (head and self.config.lm_head):
            found = [matches_any(named, member) for member in members(graph, node, name)]
            if not any(found):
                return "not a target"
            if not all(found) and not matches_any(named, name):
                return "only some of the layers fused into it are targets"
        weight = graph.weight_of(ops.weight(node))
        if weight is None or weight.origin is None or weight.dtype != torch.float32:
            return "its weight is not a float32 checkpoint tensor"
        fmt = self.format_for(graph, node, name)
        if isinstance(fmt, str):
            return fmt
        if node.target is reference.expert_linear:
            reason = self.why_not_experts(fmt, ctx)
            if reason:
                return reason
        elif weight.origin.transposed:
            return (
                f"its checkpoint stores the weight transposed, which the {fmt.label} format does not express"
            )
        n, k = weight.shape
        return fmt.lacks(n, k, ctx.target)

    def why_not_experts(self, fmt: WeightFormat, ctx: PassContext) -> str | None:
        """The reason against the experts of a layer in ``fmt``, or None."""
        if not self.takes_experts:
            return f"{self.name} leaves experts in float"
        op = ops.OF_EXPERTS.get(fmt.op)
        name = None if op is None else ops.op_name(op)
        found = [k for k in kernels.table(ctx.target.kind) if k.op == name and k.supports(ctx.target)]
        return None if found else f"no kernel for {fmt.label} weights of experts on {ctx.target.name}"

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        rewriter, before = QuantizedLinearRewriter(graph, self.config.max_tokens), graph.num_bytes()
        for site in plan.sites:
            node, fmt = self.site_format(graph, site)
            weight = graph.linear_weight(node)
            planned = weight.device.type == "meta"  # a dry run has shapes only
            tensors = fmt.meta_tensors(*weight.shape) if planned else self.quantize(site.name, weight, fmt)
            rewriter.replace(site, fmt, tensors)
        rewriter.finish()
        return PassResult(len(plan.sites), weight_stats(before, graph))

    def site_format(self, graph: Graph, site: Site) -> tuple[fx.Node, WeightFormat]:
        """The linear of a site found by ``check``, and the format."""
        (node,) = site.nodes
        fmt = self.format_for(graph, node, site.name)
        if isinstance(fmt, str):
            raise ValueError(f"{site.name}: {fmt}")
        return node, fmt


def weight_stats(before: int, graph: Graph) -> dict[str, Any]:
    """Bytes of all weights before and after a pass, for the record."""
    return {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}

"""What passes that quantize linear layers share: which layers, and how a float layer becomes an integer one.

A subclass says how a weight is quantized and which op then multiplies. The rest is the same for all: activations
are quantized dynamically, once for all layers that read them (the weights' formats differ, ``q`` is int8 in all);
layers may be left out by name; the output head is left alone unless asked for; a tied head gets a weight of its own,
so that the embedding stays as it is.
"""

from __future__ import annotations

import operator
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, fx

from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewrite import site_name

WEIGHT_ONLY = (reference.linear_w8a16,)  # ops that take activations as they are


class LinearQuantizationConfig(Config):
    lm_head: bool = Field(False, description="quantize the output head too")
    ignore: list[str] = Field(
        default_factory=list,
        description="modules to leave in float: exact names, suffixes, or 're:' patterns",
    )


class LinearQuantization(Pass):
    """A pass that replaces ``linear`` by an op on quantized activations and weights."""

    stage = Stage.QUANTIZE
    exact = False
    format: ClassVar[str]  # of the weights, for messages
    tensors: ClassVar[tuple[str, ...]]  # what replaces a weight, in the order of the op's arguments

    @abstractmethod
    def op_for(self, graph: Graph, node: fx.Node, name: str) -> Any:
        """The op that replaces ``node``, a linear called ``name``."""

    @abstractmethod
    def kernel_lacks(self, weight: Tensor, op: Any, ctx: PassContext) -> str | None:
        """Why no kernel runs this layer by ``op`` here, or None. Only shapes are looked at."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors that replace a float weight [N, K], by name; rows stay rows. What is absent becomes None."""

    @property
    @abstractmethod
    def activation_group_size(self) -> int:
        """Channels of an activation that share a scale; 0 is the whole token."""

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
            return f"its checkpoint stores the weight transposed, which the {self.format} format does not express"
        return self.kernel_lacks(weight.value, self.op_for(graph, node, name), ctx)

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
        op = self.op_for(graph, node, site.name)
        if op not in WEIGHT_ONLY and x not in quantized:
            quantized[x] = quantize_input(graph, x, self.activation_group_size)
        inputs = (x,) if op in WEIGHT_ONLY else quantized[x]
        tensors = self.quantize(graph.weights[str(weight_node.target)].value)
        names = add_weights(graph, str(weight_node.target), site.name, tensors)
        weights = [graph.weight_node(names[key], node) if key in names else None for key in self.tensors]
        with graph.fx.inserting_before(node):
            out = graph.fx.call_function(op, (*inputs, *weights, *bias))
        node.replace_all_uses_with(out)


def quantize_input(graph: Graph, x: fx.Node, group_size: int) -> tuple[fx.Node, fx.Node]:
    """Insert the quantization of ``x`` right after it; gives the nodes of q and scale."""
    with graph.fx.inserting_after(x):
        pair = graph.fx.call_function(reference.quantize_per_token, (x, group_size))
    with graph.fx.inserting_after(pair):
        scale = graph.fx.call_function(operator.getitem, (pair, 1))
        q = graph.fx.call_function(operator.getitem, (pair, 0))
    return q, scale


def add_weights(graph: Graph, source: str, site: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Register what replaces weight ``source`` of module ``site``; gives the names. A tied embedding itself stays."""
    weight = graph.weights[source]
    origin = weight.origin or Origin(())
    tied = source == graph.meta.input_embedding
    if tied:
        origin = Origin((Part(f"{site}.weight", weight.value.shape[0]),))
    module = site if tied else source.rpartition(".")[0]
    for key, tensor in tensors.items():
        graph.weights[f"{module}.{key}"] = Weight(tensor, origin.renamed(".weight", f".{key}"))
    return {key: f"{module}.{key}" for key in tensors}


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

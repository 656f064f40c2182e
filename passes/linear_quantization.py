"""What passes that quantize linear layers share: which layers, and how a float layer becomes an integer one.

A subclass says in which format a layer is stored (``weight_formats``) and may choose the codes better than by
rounding. The rest is the same for all: layers are chosen by llm-compressor's ``targets`` and ``ignore``; activations
are quantized dynamically, once for all layers that read them in the same groups; the output head is left alone unless
asked for; a tied head gets a weight of its own, so that the embedding stays as it is.
"""

from __future__ import annotations

import inspect
import operator
import re
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor, fx

from optkit.errors import UserError, nearest
from optkit.graph.ir import Graph, Origin, Part, Weight
from optkit.kernels import reference
from optkit.passes.base import Config, Pass, PassContext, PassResult, Plan, Site, Skip, Stage
from optkit.passes.rewrite import site_name
from optkit.passes.weight_formats import WeightFormat

FLOAT = "float_layer"  # key of node.meta
LINEAR = "Linear"  # the class name that stands for all linear layers


class LinearQuantizationConfig(Config):
    targets: list[str] = Field(
        default_factory=lambda: [LINEAR],
        min_length=1,
        description="layers to quantize: 'Linear' for all, names, suffixes, or 're:' patterns",
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="modules to leave in float: exact names, suffixes, or 're:' patterns",
    )
    lm_head: bool = Field(False, description="quantize the output head too")

    @field_validator("targets", "ignore")
    @classmethod
    def patterns_compile(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            check_pattern(pattern)
        return patterns


class LinearQuantization(Pass):
    """A pass that replaces ``linear`` by an op on quantized weights."""

    stage = Stage.QUANTIZE
    exact = False

    @abstractmethod
    def format_for(self, graph: Graph, node: fx.Node, name: str) -> WeightFormat | str:
        """How ``node``, a linear called ``name``, is stored; or why it can't be."""

    def quantize(self, name: str, weight: Tensor, form: WeightFormat) -> dict[str, Tensor]:
        """The tensors that replace weight [N, K] of layer ``name``: rounded to nearest, unless overridden."""
        return form.round(weight)

    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        plan = Plan()
        linears = {node: site_name(graph, node) for node in graph.calls(reference.linear)}
        check_targets(self.config.targets, graph, linears)
        for node, name in linears.items():
            reason = self.why_not(graph, node, name, ctx)
            if reason:
                plan.skips.append(Skip(name, reason))
            else:
                plan.sites.append(Site(name, (node,)))
        for node in graph.calls(reference.grouped_mm):
            plan.skips.append(Skip(f"experts {node.name}", "mixture-of-experts weights stay in float"))
        return plan

    def why_not(self, graph: Graph, node: fx.Node, name: str, ctx: PassContext) -> str | None:
        named = [target for target in self.config.targets if target != LINEAR]
        head = name == graph.meta.output_embedding
        if head and not self.config.lm_head and not listed(named, graph, node, name):
            return "the output head stays in float (lm_head: false)"
        if listed(self.config.ignore, graph, node, name):
            return "on the ignore list"
        if LINEAR not in self.config.targets and not (head and self.config.lm_head):
            found = [matches_any(named, member) for member in members(graph, node, name)]
            if not any(found):
                return "not a target"
            if not all(found) and not matches_any(named, name):
                return "only some of the layers fused into it are targets"
        weight = graph.weight_of(node.args[1])
        if weight is None or weight.origin is None or weight.value.dtype != torch.float32:
            return "its weight is not a float32 checkpoint tensor"
        form = self.format_for(graph, node, name)
        if isinstance(form, str):
            return form
        if weight.origin.transposed:
            return (
                f"its checkpoint stores the weight transposed, which the {form.label} format does not express"
            )
        n, k = weight.value.shape
        return form.lacks(n, k, ctx.target)

    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        emitter, before = Emitter(graph), graph.num_bytes()
        for site in plan.sites:
            node, form = self.site_format(graph, site)
            weight = weight_of(graph, node)
            planned = weight.device.type == "meta"  # a dry run has shapes only
            tensors = form.planned(*weight.shape) if planned else self.quantize(site.name, weight, form)
            emitter.emit(site, form, tensors)
        graph.prune()
        return PassResult(len(plan.sites), weight_stats(before, graph))

    def site_format(self, graph: Graph, site: Site) -> tuple[fx.Node, WeightFormat]:
        """The linear of a site that ``check`` found, and its format."""
        (node,) = site.nodes
        form = self.format_for(graph, node, site.name)
        if isinstance(form, str):
            raise ValueError(f"{site.name}: {form}")
        return node, form


@dataclass(frozen=True)
class FloatLayer:
    """What a quantized op stands for: the linear it replaced. In ``meta[FLOAT]`` of the op until the graph is saved."""

    site: str
    x: fx.Node
    source: str
    weight: Weight


def quantized_sites(graph: Graph) -> dict[str, fx.Node]:
    """The ops that a pass has put in place of linears, by site; none in a graph that was read from disk."""
    return {node.meta[FLOAT].site: node for node in graph.fx.nodes if FLOAT in node.meta}


def restored(graph: Graph, sites: Container[str]) -> Graph:
    """A clone in which the layers of ``sites`` are the float ones that were replaced.

    Nodes are named after those they replace, so that clones with other sites restored agree on all names.
    """
    clone = graph.clone()
    by_name = {node.name: node for node in clone.fx.nodes}
    for site, node in quantized_sites(clone).items():
        if site in sites:
            layer: FloatLayer = node.meta[FLOAT]
            clone.weights[layer.source] = layer.weight
            bias = node.args[len(node.args) - 1 :] if has_bias(node) else ()
            weight = clone.weight_node(layer.source, node)
            with clone.fx.inserting_before(node):
                linear = clone.fx.create_node(
                    "call_function",
                    reference.linear,
                    (by_name[layer.x.name], weight, *bias),
                    name=f"float_{node.name}",
                )
            node.replace_all_uses_with(linear)
    clone.prune()
    return clone


def has_bias(node: fx.Node) -> bool:
    """Whether the last argument of a quantized op is its bias."""
    last = list(inspect.signature(node.target).parameters).index("bias")
    return len(node.args) > last and node.args[last] is not None


def weight_stats(before: int, graph: Graph) -> dict[str, Any]:
    return {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}


def weight_of(graph: Graph, linear: fx.Node) -> Tensor:
    """The weight [N, K] of a linear."""
    return graph.weights[str(linear.args[1].target)].value


class Emitter:
    """Replaces linears of one graph; layers that read an activation in the same groups share its quantization."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: dict[Any, tuple[fx.Node, fx.Node]] = {}

    def emit(self, site: Site, form: WeightFormat, tensors: Mapping[str, Tensor]) -> fx.Node:
        """The op of ``form`` on ``tensors`` in place of the site's linear."""
        (node,) = site.nodes
        x, weight_node, *bias = node.args
        inputs = self.quantized(x, form.activation_group_size) if form.quantizes_input else (x,)
        source = str(weight_node.target)
        replaced = FloatLayer(site.name, x, source, self.graph.weights[source])
        names = add_weights(self.graph, source, site.name, tensors)
        weights = [self.graph.weight_node(names[t], node) if t in names else None for t in form.tensors]
        with self.graph.fx.inserting_before(node):
            out = self.graph.fx.call_function(form.op, (*inputs, *weights, *bias), form.options(tensors))
        out.meta[FLOAT] = replaced
        node.replace_all_uses_with(out)
        self.graph.fx.erase_node(node)
        return out

    def quantized(self, x: fx.Node, group_size: int) -> tuple[fx.Node, fx.Node]:
        if (x, group_size) not in self.inputs:
            self.inputs[x, group_size] = quantize_input(self.graph, x, group_size)
        return self.inputs[x, group_size]


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
        own = Origin((Part(f"{module}.{key}", len(tensor)),)) if tensor.ndim == 1 else None
        graph.weights[f"{module}.{key}"] = Weight(tensor, own or origin.renamed(".weight", f".{key}"))
    return {key: f"{module}.{key}" for key in tensors}


# -- which layers ------------------------------------------------------------------------------------------


def members(graph: Graph, node: fx.Node, name: str) -> list[str]:
    """The modules of the checkpoint that linear ``name`` is made of: itself, or those that were fused into it."""
    weight = graph.weight_of(node.args[1])
    parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
    return [part.name.rpartition(".")[0] for part in parts] if len(parts) > 1 else [name]


def listed(patterns: Sequence[str], graph: Graph, node: fx.Node, name: str) -> bool:
    """True when one of ``patterns`` names site ``name`` or a module that was fused into it."""
    return any(matches_any(patterns, member) for member in [*members(graph, node, name), name])


def matches_any(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def matches(pattern: str, name: str) -> bool:
    """llm-compressor's grammar: ``re:`` patterns match from the start, plain names match whole or as a suffix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a ``re:`` pattern that is none."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error


def check_targets(targets: Sequence[str], graph: Graph, linears: Mapping[fx.Node, str]) -> None:
    """Refuse a target that names no linear layer: a typo there would leave a model in float."""
    names = {member for node, name in linears.items() for member in [*members(graph, node, name), name]}
    for target in targets:
        if target != LINEAR and names and not any(matches(target, name) for name in names):
            fix = nearest(target.rpartition(".")[2], {name.rpartition(".")[2] for name in names} | {LINEAR})
            raise UserError(f"target '{target}' is no linear layer of this model", where="targets", fix=fix)

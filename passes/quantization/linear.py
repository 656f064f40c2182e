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
from optkit.passes.quantization.formats import WeightFormat
from optkit.passes.rewriting.stack import site_name

FLOAT = "float_layer"  # key of node.meta
FORMS_SHARE = 0.7  # of the memory, for layers that are there twice; the rest is for KV
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
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="quantize for steps of up to so many tokens; others keep the layer as it is, for a later pass",
    )

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
                limit = self.config.max_tokens
                plan.sites.append(Site(form_name(name, limit) if limit else name, (node,)))
        for node in graph.calls(reference.grouped_mm):
            plan.skips.append(Skip(f"experts {node.name}", "mixture-of-experts weights stay in float"))
        reason = self.too_large(graph, plan, ctx)
        return Plan(skips=plan.skips + [Skip(site.name, reason) for site in plan.sites]) if reason else plan

    def too_large(self, graph: Graph, plan: Plan, ctx: PassContext) -> str | None:
        """Why a second form of the layers has no room on the target, or None; the other one takes 8 bits at least."""
        if self.config.max_tokens is None:
            return None
        needed = 0
        for site in plan.sites:
            node, form = self.site_format(graph, site)
            n, k = weight_of(graph, node).shape
            needed += form.num_bytes(n, k) + n * k
        if needed <= FORMS_SHARE * ctx.target.memory_bytes:
            return None
        return f"two forms of all layers take {needed / 1e9:.0f} GB, too much for {ctx.target.name}"

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
        emitter, before = Emitter(graph, self.config.max_tokens), graph.num_bytes()
        for site in plan.sites:
            node, form = self.site_format(graph, site)
            weight = weight_of(graph, node)
            planned = weight.device.type == "meta"  # a dry run has shapes only
            tensors = form.meta_tensors(*weight.shape) if planned else self.quantize(site.name, weight, form)
            emitter.emit(site, form, tensors)
        emitter.finish()
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
    source: str
    weight: Weight


def quantized_sites(graph: Graph) -> dict[str, fx.Node]:
    """The ops that a pass has put in place of linears, by site; none in a graph that was read from disk."""
    return {node.meta[FLOAT].site: node for node in graph.fx.nodes if FLOAT in node.meta}


def restored(graph: Graph, sites: Container[str]) -> Graph:
    """A clone in which the layers of ``sites`` are the float ones that were replaced.

    A form for few tokens is given up for the layer's other form. Nodes are named after those they replace, so that
    clones with other sites restored agree on all names.
    """
    clone = graph.clone()
    for site, node in quantized_sites(clone).items():
        layer: FloatLayer = node.meta[FLOAT]
        if site in sites and (choice := choice_of(node)):
            choice.replace_all_uses_with(choice.args[1])
        elif site in sites:
            clone.weights[layer.source] = layer.weight
            weight = clone.weight_node(layer.source, node)
            with clone.fx.inserting_before(node):
                linear = clone.fx.create_node(
                    "call_function",
                    reference.linear,
                    (activation_of(node), weight, *bias_of(node)),
                    name=f"float_{node.name}",
                )
            node.replace_all_uses_with(linear)
    clone.prune()
    return clone


def choice_of(node: fx.Node) -> fx.Node | None:
    """The ``by_tokens`` that ``node`` is the form for few tokens of."""
    return next(
        (user for user in node.users if user.target is reference.by_tokens and user.args[0] is node), None
    )


def activation_of(node: fx.Node) -> fx.Node:
    """The float activation that a quantized op reads, before it is quantized."""
    x = node.args[0]
    quantized = x.target is operator.getitem and x.args[0].target is reference.quantize_per_token
    return x.args[0].args[0] if quantized else x


def bias_of(node: fx.Node) -> tuple[Any, ...]:
    """The bias argument of a quantized op, as its linear had it: maybe None, maybe not there."""
    return node.args[list(inspect.signature(node.target).parameters).index("bias") :]


def weight_stats(before: int, graph: Graph) -> dict[str, Any]:
    return {"weight_bytes_before": before, "weight_bytes_after": graph.num_bytes()}


def weight_of(graph: Graph, linear: fx.Node) -> Tensor:
    """The weight [N, K] of a linear."""
    return graph.weights[str(linear.args[1].target)].value


class Emitter:
    """Replaces linears of one graph; layers that read an activation in the same groups share its quantization.

    With a ``limit`` it is for steps of up to so many tokens, once all are replaced (``finish``): until then whatever
    is calibrated sees the rounding of the layers before.
    """

    def __init__(self, graph: Graph, limit: int | None = None) -> None:
        self.graph, self.limit = graph, limit
        self.inputs: dict[Any, tuple[fx.Node, fx.Node]] = {}
        self.emitted: list[fx.Node] = []

    def emit(self, site: Site, form: WeightFormat, tensors: Mapping[str, Tensor]) -> fx.Node:
        """The op of ``form`` on ``tensors`` in place of the site's linear."""
        (node,) = site.nodes
        x, weight_node, *bias = node.args
        inputs = self.quantized(x, form.activation_group_size) if form.quantizes_input else (x,)
        source = str(weight_node.target)
        replaced = FloatLayer(site.name, source, self.graph.weights[source])
        names = add_weights(self.graph, source, site.name, tensors, self.limit)
        weights = [self.graph.weight_node(names[t], node) if t in names else None for t in form.tensors]
        with self.graph.fx.inserting_before(node):
            out = self.graph.fx.call_function(form.op, (*inputs, *weights, *bias), form.options(tensors))
        out.meta[FLOAT] = replaced
        self.emitted.append(out)
        node.replace_all_uses_with(out)
        self.graph.fx.erase_node(node)
        return out

    def finish(self) -> None:
        """Bring back the replaced layers for steps of more tokens than the limit; then remove what nothing reads."""
        if self.limit is not None:
            positions = self.graph.input("positions")
            for node in self.emitted:
                self.choose(node, positions, self.limit)
        self.graph.prune()

    def choose(self, few: fx.Node, positions: fx.Node, limit: int) -> None:
        """``few`` in steps of up to ``limit`` tokens, else the layer that it stands for."""
        layer: FloatLayer = few.meta[FLOAT]
        self.graph.weights[layer.source] = layer.weight
        with self.graph.fx.inserting_after(few):
            many = self.graph.fx.call_function(reference.linear)
        weight = self.graph.weight_node(layer.source, many)
        many.args = (activation_of(few), weight, *bias_of(few))
        with self.graph.fx.inserting_after(many):
            chosen = self.graph.fx.call_function(reference.by_tokens)
        few.replace_all_uses_with(chosen)
        chosen.args = (few, many, positions, limit)

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


def form_name(module: str, limit: int) -> str:
    """What a module's form for steps of up to ``limit`` tokens is called."""
    return f"{module}.up_to_{limit}_tokens"


def add_weights(
    graph: Graph, source: str, site: str, tensors: Mapping[str, Tensor], limit: int | None = None
) -> dict[str, str]:
    """Register what replaces weight ``source`` of module ``site``; gives the names. A tied embedding itself stays.

    With a ``limit`` the tensors are those of the module's form for so many tokens.
    """
    weight = graph.weights[source]
    origin = weight.origin or Origin(())
    tied = source == graph.meta.input_embedding
    if tied:
        origin = Origin((Part(f"{site}.weight", weight.value.shape[0]),))
    module, inside = site if tied else source.rpartition(".")[0], ""
    if limit is not None and not tied:
        module, inside = form_name(module, limit), form_name("", limit)
    for key, tensor in tensors.items():
        own = Origin((Part(f"{module}.{key}", len(tensor)),)) if tensor.ndim == 1 else None
        graph.weights[f"{module}.{key}"] = Weight(tensor, own or origin.renamed(".weight", f"{inside}.{key}"))
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

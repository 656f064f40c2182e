"""Insertion of quantized linears into a graph, and fallback to the replaced float layers.

``insert`` serves quantized checkpoints and passes alike. A pass also keeps the replaced layer as the ``FloatOrigin``
of the new op, in ``node.meta``; states of the pipeline keep the float layer on disk. So ``fall_back`` works on any
graph of a run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from optkit.checkpoint.quantized_linear import SCALE, QuantizedLinear, operand_names
from optkit.graph import ops
from optkit.graph.ir import Graph, Origin, Part, Weight, module_name
from optkit.graph.stored import StoredTensor
from optkit.kernels import reference

FLOAT_ORIGIN = "float_origin"  # key of node.meta


@dataclass(frozen=True)
class FloatOrigin:
    """The float linear or embedding replaced by a quantized op.

    Attributes:
        site: the layer's name in reports.
        weight_name: the name of the float weight in the graph.
        origin: the checkpoint tensors of the float weight.
        dtype: the dtype of the float weight.
        read: returns the float weight [N, K] or [V, K], mapped or stored in a graph read from a state.
    """

    site: str
    weight_name: str
    origin: Origin | None
    dtype: torch.dtype
    read: Callable[[], Tensor | StoredTensor]

    @staticmethod
    def of(graph: Graph, layer: fx.Node, site: str) -> FloatOrigin:
        """The origin of an op in the place of ``layer``, a float layer of ``graph``."""
        name = str(ops.weight(layer).target)
        weight = graph.weights[name]
        stored = weight.stored
        return FloatOrigin(site, name, weight.origin, stored.dtype, lambda: stored)

    def restore(self, graph: Graph) -> None:
        """Register the float weight in ``graph``."""
        graph.weights[self.weight_name] = Weight(self.read(), self.origin)


def float_origins(graph: Graph) -> dict[fx.Node, FloatOrigin]:
    """The quantized ops made by passes, in execution order, with the replaced float layers."""
    return {node: node.meta[FLOAT_ORIGIN] for node in graph.fx.nodes if FLOAT_ORIGIN in node.meta}


def quantized_sites(graph: Graph) -> dict[str, fx.Node]:
    """The quantized linears made by passes, by site; an embedding is part of the head's site."""
    origins = float_origins(graph).items()
    return {origin.site: node for node, origin in origins if node.target is not reference.embedding_w8}


# -- float to quantized ------------------------------------------------------------------------------------


def insert(graph: Graph, linear: fx.Node, layer: QuantizedLinear) -> fx.Node:
    """Replace the node ``linear``, a linear layer or one of experts, by the op of ``layer``; returns the op."""
    x, weight_node, *rest = linear.args  # a bias, and the experts of tokens
    op = ops.OF_EXPERTS[layer.op] if linear.target is reference.expert_linear else layer.op
    group = layer.activation_group
    inputs = (x,) if group is None else quantized_activation(graph, x, group)
    register_operands(graph, str(weight_node.target), layer)
    names = [f"{layer.name}.{key}" if key in layer.operands else None for key in operand_names(op)]
    weights = [None if name is None else graph.weight_node(name, linear) for name in names]
    with graph.fx.inserting_before(linear):
        out = graph.fx.call_function(op, (*inputs, *weights, *rest), {**linear.kwargs, **layer.options})
    linear.replace_all_uses_with(out)
    graph.fx.erase_node(linear)
    return out


def register_operands(graph: Graph, weight_name: str, layer: QuantizedLinear) -> None:
    """Add the operands of ``layer`` to the graph's weights; ``weight_name`` is the weight of the replaced linear.

    Operands of a fused layer belong to the modules row by row. The weight of a tied embedding stays.
    """
    weight = graph.weights[weight_name]
    parts = weight.origin.parts if weight.origin else ()
    suffix = layer.name.removeprefix(module_name(weight_name))  # of a variant for few tokens
    if weight_name == graph.meta.input_embedding:
        parts, suffix = (Part(f"{layer.name}.weight", weight.shape[0]),), ""
    for key, value in layer.operands.items():
        origin = Origin(parts).renamed(".weight", f"{suffix}.{key}")
        if value.ndim == 1:
            origin = Origin((Part(f"{layer.name}.{key}", len(value)),))
        elif len(parts) == 1:  # a transposed float weight counts its rows the other way
            origin = replace(origin, parts=(Part(origin.parts[0].name, len(value)),))
        graph.weights[f"{layer.name}.{key}"] = graph.new_weight(value, origin)


def quantized_activation(graph: Graph, x: fx.Node, group: int) -> tuple[fx.Node, fx.Node]:
    """Int8 values and scales of activation ``x``, from an op shared by all readers."""
    for user in x.users:
        if user.target is reference.quantize_per_token and ops.argument(user, "group_size") == group:
            pieces = {piece.args[1]: piece for piece in user.users}
            return pieces[0], pieces[1]
    with graph.fx.inserting_after(x):
        pair = graph.fx.call_function(reference.quantize_per_token, (x, group))
    with graph.fx.inserting_after(pair):
        scale = graph.fx.call_function(operator.getitem, (pair, 1))
        return graph.fx.call_function(operator.getitem, (pair, 0)), scale


def share_with_embedding(graph: Graph, head: fx.Node) -> None:
    """Replace the token embedding by rows of the int8 weight of ``head``, the output head tied to the embedding.

    In the checkpoint the weight and its scales belong to the embedding. Both ops fall back to float together.
    """
    name = graph.meta.input_embedding
    operands = [ops.argument(head, key) for key in ("weight", SCALE)]
    for operand, key in zip(operands, ("weight", SCALE), strict=True):
        stored = graph.weights[str(operand.target)].stored
        origin = Origin((Part(f"{module_name(name)}.{key}", stored.shape[0]),))
        graph.weights[str(operand.target)] = Weight(stored, origin)
    for node in graph.calls(reference.embedding):
        if str(ops.weight(node).target) != name:
            continue
        weights = [graph.weight_node(str(operand.target), node) for operand in operands]
        with graph.fx.inserting_before(node):
            rows = graph.fx.call_function(reference.embedding_w8, (ops.argument(node, "ids"), *weights))
        if FLOAT_ORIGIN in head.meta:
            rows.meta[FLOAT_ORIGIN] = FloatOrigin.of(graph, node, head.meta[FLOAT_ORIGIN].site)
        node.replace_all_uses_with(rows)
    graph.prune()


# -- quantized to float ------------------------------------------------------------------------------------


def fall_back(graph: Graph, sites: Container[str]) -> Graph:
    """A clone of ``graph`` with the layers of ``sites`` in float again.

    A variant for few tokens falls back to the layer's other variant. New nodes are named after the replaced nodes:
    clones with other sites agree on all names.
    """
    clone = graph.clone()
    for node, origin in float_origins(clone).items():
        if origin.site not in sites:
            continue
        choice = choice_of(node)
        if choice is not None:
            choice.replace_all_uses_with(ops.argument(choice, "many"))
            continue
        origin.restore(clone)
        with clone.fx.inserting_before(node):
            layer = float_layer(clone, node, origin.weight_name, f"float_{node.name}")
        node.replace_all_uses_with(layer)
    clone.prune()
    return clone


def float_layer(graph: Graph, node: fx.Node, weight_name: str, name: str | None = None) -> fx.Node:
    """The float linear or embedding with the inputs of the quantized op ``node``, at the insertion point."""
    weight = graph.weight_node(weight_name, node)
    if node.target is reference.embedding_w8:
        args = (weight, ops.argument(node, "ids"))
        return graph.fx.create_node("call_function", reference.embedding, args, name=name)
    args = (activation_of(node), weight, *bias_of(node))
    if ops.op_of(node).linear is None:
        return graph.fx.create_node("call_function", reference.linear, args, name=name)
    options = {"num_experts": ops.argument(node, "num_experts")}
    return graph.fx.create_node("call_function", reference.expert_linear, args, options, name=name)


def choice_of(node: fx.Node) -> fx.Node | None:
    """The ``by_tokens`` in which ``node`` is the variant for few tokens."""
    choices = (user for user in node.users if user.target is reference.by_tokens)
    return next((choice for choice in choices if ops.argument(choice, "few") is node), None)


def activation_of(node: fx.Node) -> fx.Node:
    """The float activation of a quantized op, before int8 quantization."""
    x = ops.activation(node)
    quantized = x.target is operator.getitem and x.args[0].target is reference.quantize_per_token
    return ops.activation(x.args[0]) if quantized else x


def bias_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a quantized op from the bias on, as in the replaced linear."""
    return node.args[ops.op_of(node).positions["bias"] :]

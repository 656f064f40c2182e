"""Small steps common to rewriting passes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optkit.checkpoint.quantized_linear import SHARED, operand_names
from optkit.graph import ops
from optkit.graph.ir import Graph, Origin, Weight
from optkit.graph.stored import stack_stored
from optkit.kernels import reference

aten = torch.ops.aten
FLOAT_LINEARS = (reference.linear, reference.expert_linear)
LINEARS = {*FLOAT_LINEARS, *ops.QUANTIZED_LINEARS}  # float, and as the checkpoint or a pass quantized it


def stack_linears(graph: Graph, linears: Sequence[fx.Node], name: str) -> fx.Node:
    """A linear in place of several on the same input (``can_stack``); gives [T, sum of N].

    Operands are stacked row after row, so the result's columns are the outputs in order. The new operand's origin
    lists the origins of all: on disk nothing changes. Operands by input channel are shared, not stacked.
    """
    head = linears[0]
    first, operands = layout(head)
    arguments: list[Any] = list(head.args[:first])
    for position, operand in enumerate((*operands, "bias"), first):
        nodes = [argument(linear, position) for linear in linears]
        if nodes[0] is None or operand in SHARED:
            arguments.append(nodes[0])
            continue
        stack_weights(graph, [str(node.target) for node in nodes], f"{name}.{operand}")
        arguments.append(graph.weight_node(f"{name}.{operand}", head))
    with graph.fx.inserting_before(head):
        return graph.fx.call_function(head.target, tuple(arguments), head.kwargs)


def layout(linear: fx.Node) -> tuple[int, tuple[str, ...]]:
    """The position of a linear's first weight argument, and the names of the weight arguments; a bias follows."""
    if linear.target in FLOAT_LINEARS:
        return 1, ("weight",)
    return ops.op_of(linear).first_weight, operand_names(linear.target)


def argument(linear: fx.Node, position: int) -> Any:
    return linear.args[position] if len(linear.args) > position else None


def stack_weights(graph: Graph, names: Sequence[str], new: str) -> None:
    """Register the concatenation of weights ``names`` along dimension 0 as ``new``."""
    weights = [graph.weights[name] for name in names]
    parts = tuple(part for weight in weights for part in (weight.origin.parts if weight.origin else ()))
    graph.weights[new] = Weight(stack_stored([weight.stored for weight in weights]), Origin(parts))


def can_stack(graph: Graph, linears: Sequence[fx.Node]) -> str | None:
    """The reason against stacking the linears, or None."""
    head = linears[0]
    if any(linear.target is not head.target or linear.kwargs != head.kwargs for linear in linears):
        return "the projections are quantized in different ways"
    first, operands = layout(head)
    if any(linear.args[:first] != head.args[:first] for linear in linears):
        return "the projections read different inputs"
    for position, operand in enumerate((*operands, "bias"), first):
        reason = can_stack_operand(graph, [argument(linear, position) for linear in linears], operand)
        if reason:
            return reason
    return None


def can_stack_operand(graph: Graph, nodes: Sequence[Any], operand: str) -> str | None:
    """The reason against stacking or sharing an operand of several linears, or None."""
    if len({node is None for node in nodes}) > 1:
        return f"only some of the projections have a {operand}"
    if nodes[0] is None:
        return None
    weights = [graph.weight_of(node) for node in nodes]
    found = [w for w in weights if w is not None and w.origin is not None and not w.origin.transposed]
    if len(found) < len(nodes):
        return "a weight is not a plain checkpoint tensor"
    head = found[0]
    if any(weight.dtype != head.dtype or weight.shape[1:] != head.shape[1:] for weight in found):
        return f"the projections differ in the format of their {operand}"
    planned = head.is_meta  # of a dry run: values are not known
    if operand in SHARED and not planned and not all(torch.equal(w.value, head.value) for w in found):
        return f"the projections differ in their {operand}, which belongs to the input"
    return None


def split_columns(graph: Graph, value: fx.Node, old: Sequence[fx.Node], sizes: Sequence[int]) -> None:
    """Replace each of ``old`` by columns of ``value`` [T, sum of sizes]."""
    with graph.fx.inserting_after(value):
        pieces = graph.fx.call_function(aten.split_with_sizes.default, (value, list(sizes), -1))
    anchor = pieces
    for index, node in enumerate(old):
        with graph.fx.inserting_after(anchor):
            anchor = graph.fx.call_function(operator.getitem, (pieces, index))
        node.replace_all_uses_with(anchor)


def out_features(graph: Graph, linear: fx.Node) -> int:
    return graph.weights[weight_name(linear)].shape[0]


def weight_name(linear: fx.Node) -> str:
    """The name of a linear's first weight."""
    return str(linear.args[layout(linear)[0]].target)


def site_name(graph: Graph, linear: fx.Node) -> str:
    """The module of a linear; a tied head has the head's name."""
    weight = weight_name(linear)
    return graph.meta.output_embedding if weight == graph.meta.input_embedding else weight.rpartition(".")[0]

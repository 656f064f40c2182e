"""Small steps that rewriting passes share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optkit.graph.ir import Graph, Origin, Weight
from optkit.kernels import reference

aten = torch.ops.aten


def stack_linears(graph: Graph, linears: Sequence[fx.Node], name: str) -> fx.Node:
    """One linear in place of several that read the same input; gives [T, sum of N].

    Weights are stacked row after row, so the result's columns are the outputs in order. The new weight's origin
    lists the old ones': on disk nothing changes.
    """
    first = linears[0]
    arguments: list[Any] = [first.args[0]]
    for position in (1, 2):
        nodes = [linear.args[position] for linear in linears if len(linear.args) > position]
        if nodes and nodes[0] is not None:
            suffix = ".weight" if position == 1 else ".bias"
            stack_weights(graph, [str(node.target) for node in nodes], name + suffix)
            arguments.append(graph.weight_node(name + suffix, first))
    with graph.fx.inserting_before(first):
        return graph.fx.call_function(reference.linear, tuple(arguments))


def stack_weights(graph: Graph, names: Sequence[str], new: str) -> None:
    """Register the concatenation of weights ``names`` along dimension 0 as ``new``."""
    weights = [graph.weights[name] for name in names]
    parts = tuple(part for weight in weights for part in (weight.origin.parts if weight.origin else ()))
    graph.weights[new] = Weight(torch.cat([weight.value for weight in weights]), Origin(parts))


def can_stack(graph: Graph, linears: Sequence[fx.Node]) -> str | None:
    """Why these linears can't become one, or None when they can."""
    if len({linear.args[0] for linear in linears}) > 1:
        return "the projections read different inputs"
    if len({len(linear.args) > 2 and linear.args[2] is not None for linear in linears}) > 1:
        return "only some of the projections have a bias"
    weights = [graph.weight_of(linear.args[1]) for linear in linears]
    if any(w is None or w.origin is None or w.origin.transposed for w in weights):
        return "a weight is not a plain checkpoint tensor"
    return None


def split_columns(graph: Graph, value: fx.Node, old: Sequence[fx.Node], sizes: Sequence[int]) -> None:
    """Replace each of ``old`` by its columns of ``value`` [T, sum of sizes]."""
    with graph.fx.inserting_after(value):
        pieces = graph.fx.call_function(aten.split_with_sizes.default, (value, list(sizes), -1))
    anchor = pieces
    for index, node in enumerate(old):
        with graph.fx.inserting_after(anchor):
            anchor = graph.fx.call_function(operator.getitem, (pieces, index))
        node.replace_all_uses_with(anchor)


def out_features(graph: Graph, linear: fx.Node) -> int:
    return graph.weights[str(linear.args[1].target)].value.shape[0]


def site_name(graph: Graph, linear: fx.Node) -> str:
    """The module a linear came from; a head that is tied to the embedding is called by the head's name."""
    weight = str(linear.args[1].target)
    return graph.meta.output_embedding if weight == graph.meta.input_embedding else weight.rpartition(".")[0]

"""Folding of a scale per channel into the producer of an activation: the division costs nothing at run time.

Channel j of an activation divided by ``s_j``, and column j of every weight on the activation multiplied by ``s_j``, is
the same model. The division goes into an RMSNorm's weight, or into the up projection before the down projection.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference

GATED, PACKED = tuple(ops.GATED), tuple(ops.GATED.values())


def readers(graph: Graph) -> dict[fx.Node, list[fx.Node]]:
    """Linears by input activation."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.linears():
        found.setdefault(ops.activation(node), []).append(node)
    return found


def why_not_foldable(graph: Graph, x: fx.Node, linears: list[fx.Node]) -> str | None:
    if any(graph.weight_of(ops.weight(n)) is None for n in linears):
        return "its weight is computed"
    if any(str(ops.weight(n).target) == graph.meta.input_embedding for n in linears):
        return "its weight is tied to the embedding"
    if any(user.target is not reference.linear for user in x.users):
        return "something besides linear layers reads its input"
    if producer_weight(graph, x) is None:
        return "no norm weight or up projection to fold the scale into"
    return None


def producer_weight(graph: Graph, x: fx.Node) -> fx.Node | None:
    """The weight node with a scale for each channel of x: of a norm, or the rows of the up projection."""
    if is_norm_output(x):
        weight = ops.weight(norm_of(x))
        return weight if private(graph, weight) else None
    if x.target in PACKED + GATED:
        up = ops.argument(x, "gate_up" if x.target in PACKED else "up")
        alone = isinstance(up, fx.Node) and up.target is reference.linear and len(up.users) == 1
        return ops.weight(up) if alone and private(graph, ops.weight(up)) else None
    return None


def private(graph: Graph, node: Any) -> bool:
    """True for a weight with a single reader: a change affects nothing else."""
    if graph.weight_of(node) is None:
        return False
    same = [n for n in graph.fx.nodes if n.op == "get_attr" and n.target == node.target]
    return sum(len(n.users) for n in same) == 1


def is_norm_output(x: fx.Node) -> bool:
    return norm_of(x) is not None


def norm_of(x: fx.Node) -> Any:
    if x.target is reference.rms_norm:
        return x
    fused = x.target is operator.getitem and x.args[1] == 0 and x.args[0].target is reference.add_rms_norm
    return x.args[0] if fused else None


# -- changing weights ------------------------------------------------------------------------------------


def fold(graph: Graph, x: fx.Node, linears: Sequence[fx.Node], scale: Tensor) -> None:
    """Divide activation ``x`` by ``scale`` [K] in the producer, and multiply the readers' weights by ``scale``."""
    divide_producer(graph, x, scale)
    for linear in linears:
        graph.set_weight(ops.weight(linear), graph.linear_weight(linear) * scale)


def divide_producer(graph: Graph, x: fx.Node, scale: Tensor) -> None:
    """Fold ``1 / scale`` into what makes x."""
    weight = producer_weight(graph, x)
    if weight is None:
        raise ValueError(f"{x.name} has no producer to fold into")
    value = graph.weight_value(weight)
    if is_norm_output(x):
        offset = norm_offset(x)
        graph.set_weight(weight, (value + offset) / scale - offset)
        return
    if x.target in PACKED:
        scale = torch.cat((torch.ones_like(scale), scale))
    graph.set_weight(weight, value / scale[:, None])
    bias = up_bias(x)
    if bias is not None:
        graph.set_weight(bias, graph.weight_value(bias) / scale)


def norm_offset(x: fx.Node) -> float:
    return float(ops.argument(norm_of(x), "offset"))


def up_bias(x: fx.Node) -> Any:
    return ops.bias(ops.argument(x, "gate_up" if x.target in PACKED else "up"))

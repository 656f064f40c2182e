"""A graph as text for people: an op a line, weights by name, sizes at a given batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.shapes import Point, infer_shapes


def list_graph(graph: Graph, point: Point, kernels: dict[str, str] | None = None) -> Iterator[str]:
    """Lines like ``linear_3 = linear(reshape_2, model.layers.0.self_attn.o_proj.weight)  # [512, 576]``.

    ``kernels`` (node name to kernel name, from ``Executable.kernels``) adds which kernel runs each op.
    """
    values = infer_shapes(graph, point)
    for node in graph.fx.nodes:
        if node.op == "call_function":
            args = ", ".join(
                [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            )
            kernel = f"  <{kernels[node.name]}>" if kernels and node.name in kernels else ""
            yield f"{node.name} = {op_name(node.target)}({args})  # {sizes(values[node])}{kernel}"


def text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(text(v) for v in value) + "]"
    return str(value)


def sizes(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return ", ".join(sizes(v) for v in value)
    return str(value)

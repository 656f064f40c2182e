"""Regions: stretches of a graph that are lowered as one compiled function, shared by all that look alike.

A model's decoder layers are the same program with other weights. Compiled whole, thirty layers are compiled thirty
times; compiled *regionally*, once: the layer becomes a function whose arguments are everything it reads (activations,
its weights, its KV pools, the batch) and every layer calls it. The price is that nothing fuses across the boundary.

A region is a run of call nodes, contiguous in execution order. Its **inputs** are the values it reads from outside,
in order of first use; its **outputs** the values read outside. Two regions are interchangeable when their
``structure`` is equal: same ops, same wiring under local numbering, same constants, same shapes of what they
read. Names and weight values don't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.shapes import Point, infer_shapes


@dataclass(frozen=True)
class Region:
    """A run of call nodes with what goes in and what comes out."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @staticmethod
    def of(nodes: Sequence[fx.Node]) -> Region:
        """The region of ``nodes``; inputs and outputs follow from what is read."""
        inside = set(nodes)
        read = dict.fromkeys(a for node in nodes for a in ordered_inputs(node) if a not in inside)
        outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
        return Region(tuple(nodes), tuple(read), outputs)


def ordered_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes a node reads, in argument order, repeats included."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def structure(region: Region, values: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
    """What two regions must share to run the same code; ``values`` are the graph's shapes at any one batch."""
    numbers = {node: ("in", i) for i, node in enumerate(region.inputs)}
    numbers |= {node: ("node", i) for i, node in enumerate(region.nodes)}
    calls = tuple(
        (op_name(n.target), local(n.args, numbers), local(n.kwargs, numbers), n.meta.get("kernel"))
        for n in region.nodes
    )
    return (
        calls,
        tuple((node.op, signature(values[node])) for node in region.inputs),
        tuple(numbers[n] for n in region.outputs),
    )


def local(value: Any, numbers: Mapping[fx.Node, Any]) -> Any:
    """An argument with nodes replaced by their local numbers, hashable."""
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return tuple(local(item, numbers) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, local(item, numbers)) for key, item in sorted(value.items()))
    return (type(value).__name__, str(value))


def signature(value: Any) -> Any:
    """Shape, strides and dtype of a value, or of each of several."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(signature(item) for item in value) if isinstance(value, (list, tuple)) else str(value)


def shapes(graph: Graph) -> dict[fx.Node, Any]:
    """Shapes of all values at a batch whose sizes are all different, so that none are equal by chance."""
    return infer_shapes(graph, Point(tokens=11, sequences=3, context=37), block_size=5)


def call_nodes(graph: Graph) -> Iterator[fx.Node]:
    return (node for node in graph.fx.nodes if node.op == "call_function")

"""Regions: parts of a graph lowered to a single compiled function, common to all parts of the same structure.

A model's decoder layers are the same program with other weights. A whole model of thirty layers compiles the layer
thirty times; *regional* compilation compiles the layer once, as a function of activations, weights, KV pools and the
batch, and every layer calls the function. The price: nothing fuses across the boundary.

A region is a run of call nodes, contiguous in execution order. The **inputs** are the values from outside, in order of
first use; the **outputs** the values read outside. Two regions are interchangeable when their ``structure`` is equal:
same ops, same wiring under local numbering, same constants, same shapes of inputs. Names and weight values don't count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from optkit.graph.ir import Graph
from optkit.graph.ops import op_name
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference

# Three batches show the dependences of each size: the second has other sequences and blocks, the third more tokens.
# In the first all sizes differ, so that none are equal by chance.
BATCHES = ((Point(11, 3, 37), 5), (Point(11, 4, 50), 6), (Point(12, 3, 37), 5))


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
    """The features shared by regions with the same code; ``values`` are the graph's shapes at any batch."""
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


def why_not(region: Region, values: Mapping[fx.Node, Any], other: Mapping[fx.Node, Any]) -> str | None:
    """The reason against compiling a region, or None; ``other`` are shapes at the same T with other sequences and
    blocks.

    The compiler takes varying sizes to be 2 or more. A batch may have a single sequence or block, so a value with a
    varying size may only reach attention, which is opaque to the compiler.
    """
    if sum(node.target is reference.attention for node in region.nodes) != 1:
        return "it has not exactly one attention op"
    for node in region.inputs:
        if not isinstance(values[node], Tensor):
            return f"it reads {node.name}, which is no tensor"
        varies = values[node].shape != other[node].shape
        if varies and any(u.target is not reference.attention for u in node.users if u in region.nodes):
            return f"{node.name} is read outside attention"
    tokens = BATCHES[0][0].tokens
    if any(values[node].shape[0] != tokens for node in region.outputs):
        return "it has a result without a row for each token"
    return None


def shapes(graph: Graph, batch: int = 0) -> dict[fx.Node, Any]:
    """Shapes of all values at batch number ``batch`` of ``BATCHES``."""
    return infer_shapes(graph, *BATCHES[batch])


def call_nodes(graph: Graph) -> Iterator[fx.Node]:
    return (node for node in graph.fx.nodes if node.op == "call_function")

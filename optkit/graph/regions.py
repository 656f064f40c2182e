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
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from optkit.errors import UserError
from optkit.graph.compiled_region import Argument, CompiledRegion
from optkit.graph.ir import Graph
from optkit.graph.opaque import operator
from optkit.graph.ops import op_name
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import reference

# Inside a region the compiler generates these from their reference, fused with their neighbours, whatever kernel
# runs them outside. Others keep their kernel.
FUSED = {"rms_norm", "add_rms_norm", "layer_norm", "rope", "rope_table", "silu_mul", "gelu_mul", "silu_mul_packed",
         "gelu_mul_packed", "quantize_per_token", "embedding", "select_rows"}  # fmt: skip
UNTRACEABLE = {"attention", "grouped_mm"}  # their references loop in Python over the batch

# Three batches tell what each size depends on: the second has other sequences and blocks, the third more tokens.
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


def why_not(region: Region, values: Mapping[fx.Node, Any], other: Mapping[fx.Node, Any]) -> str | None:
    """Why a region can't be compiled, or None; ``other`` are shapes at the same T with other sequences and blocks.

    The compiler takes a size that may vary for at least 2. There may be one sequence or one block, so what is
    shaped by them may only reach attention, which is opaque to the compiler.
    """
    if sum(node.target is reference.attention for node in region.nodes) != 1:
        return "it has not exactly one attention op"
    for node in region.inputs:
        if not isinstance(values[node], Tensor):
            return f"it reads {node.name}, which is no tensor"
        varies = values[node].shape != other[node].shape
        if varies and any(u.target is not reference.attention for u in node.users if u in region.nodes):
            return f"{node.name} is read outside attention"
    return None


def shapes(graph: Graph, batch: int = 0) -> dict[fx.Node, Any]:
    """Shapes of all values at one of ``BATCHES``."""
    return infer_shapes(graph, *BATCHES[batch])


def call_nodes(graph: Graph) -> Iterator[fx.Node]:
    return (node for node in graph.fx.nodes if node.op == "call_function")


# -- lowering ----------------------------------------------------------------------------------------------


class RegionLowering:
    """Lowers ``graph.plan["compile"]``: made before kernels are bound, ``install`` called after.

    Raises:
        UserError: the plan does not fit the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.plan = graph.plan.get("compile")
        if not self.plan:
            return
        self.values = [shapes(graph, batch) for batch in range(len(BATCHES))]
        self.regions = planned_regions(graph, self.plan["regions"])
        check_regions(self.regions, self.values)
        nodes = self.regions[0].nodes
        self.unbound = [(node.target, node.args, dict(node.meta)) for node in nodes]

    def install(self, root: nn.Module) -> None:
        """Replace each region by one call of a ``CompiledRegion`` shared by all."""
        if not self.plan:
            return
        model = Region.of(self.regions[0].nodes)  # again: binding changed what it reads
        plain = region_module(model, {})
        traced = region_module(model, self.compiler_targets(model))
        arguments = [self.argument(node, root) for node in model.inputs]
        (attention,) = (args for target, args, _ in self.unbound if target is reference.attention)
        compiled = CompiledRegion(
            plain,
            traced,
            arguments,
            model.inputs.index(attention[5]),
            self.plan["buckets"],
            self.plan["dynamic_tail"],
        )
        root.add_module("region", compiled)
        for region in self.regions:
            call_region(self.graph.fx, Region.of(region.nodes))

    def compiler_targets(self, region: Region) -> dict[fx.Node, Any]:
        """What each node calls inside generated code: its reference, or its kernel as an opaque op."""
        targets: dict[fx.Node, Any] = {}
        for node, (target, args, meta) in zip(region.nodes, self.unbound, strict=True):
            name = op_name(target)
            packed = {i: self.values[0][a] for i, a in enumerate(args) if node.args[i] is not a}
            if name in FUSED and not packed and "kernel" not in meta:
                targets[node] = target
            elif node.target is not target or name in UNTRACEABLE:
                targets[node] = operator(target, node.target, packed)
        return targets

    def argument(self, node: fx.Node, root: nn.Module) -> Argument:
        """What the compiler is told of a region input."""
        device = next(root.buffers()).device
        if node.op == "get_attr":
            value = getattr(root, str(node.target))
            size = tuple(value.shape)
            return Argument(value.dtype, device, size, (0,) * len(size), (False,) * len(size), value)
        first, other, more = (values[node] for values in self.values)
        tokens = BATCHES[0][0].tokens
        per_token = tuple(b - a for a, b in zip(first.shape, more.shape, strict=True))
        base = tuple(a - p * tokens for a, p in zip(first.shape, per_token, strict=True))
        varies = tuple(a != b for a, b in zip(first.shape, other.shape, strict=True))
        return Argument(first.dtype, device, base, per_token, varies)


def planned_regions(graph: Graph, names: Sequence[Sequence[str]]) -> list[Region]:
    """The regions a plan names; their nodes must exist and be contiguous."""
    calls = list(call_nodes(graph))
    position = {node.name: index for index, node in enumerate(calls)}
    regions = []
    for members in names:
        start = position.get(members[0], 0) if members else 0
        nodes = calls[start : start + len(members)]
        if not members or [node.name for node in nodes] != list(members):
            raise UserError(
                "its compile plan names ops that are not there, in that order", where="graph.json"
            )
        regions.append(Region.of(nodes))
    return regions


def check_regions(regions: Sequence[Region], values: Sequence[Mapping[fx.Node, Any]]) -> None:
    """One code for all only where all are equal, and none that can't be compiled."""
    if not regions or len({structure(region, values[0]) for region in regions}) > 1:
        raise UserError("its compile plan names layers that are not alike", where="graph.json")
    reason = why_not(regions[0], *values[:2])
    if reason:
        raise UserError(
            f"its compile plan names a layer that can't be compiled: {reason}", where="graph.json"
        )


def region_module(region: Region, targets: Mapping[fx.Node, Any]) -> fx.GraphModule:
    """The region as a function of its inputs; gives the tuple of its outputs."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input{i}") for i, node in enumerate(region.inputs)}
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = targets.get(node, node.target)
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule(nn.Module(), graph)


def call_region(graph: fx.Graph, region: Region) -> None:
    """Put a call of the shared region after the nodes of ``region`` and remove them."""
    with graph.inserting_after(region.nodes[-1]):
        call = graph.call_module("region", region.inputs)
    anchor = call
    for index, node in enumerate(region.outputs):
        with graph.inserting_after(anchor):
            anchor = graph.call_function(getitem, (call, index))
        node.replace_all_uses_with(anchor)
    for node in reversed(region.nodes):
        graph.erase_node(node)

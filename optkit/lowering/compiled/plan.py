"""Lowering of ``graph.annotations["compile"]``: a layer as source for the compiler, and calls of the compiled code.

``region_source`` makes the layer a function with an argument for each outside value, and records the fixed sizes of
each argument. Inside generated code the small ops are references, fused by the compiler; an op with a kernel is an
opaque operator. ``install`` replaces the planned layers of a bound graph by calls of a ``CompiledRegion``.

The plan is written by the pass, completed by ``optkit.pipeline.aot_compile`` and stored in graph.json: ``{"regions":
[[node names], ...], "buckets": [[first, last], ...], "dynamic_tail": bool}``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from optkit.errors import UserError
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.lowering.bind import bind, kernel_of
from optkit.lowering.compiled.opaque import operator
from optkit.lowering.compiled.region import Argument, CompiledRegion, Variant
from optkit.lowering.compiled.regions import BATCHES, Region, call_nodes, shapes, structure, why_not
from optkit.lowering.lower import graph_module

if TYPE_CHECKING:
    from optkit.machine.target import Target

PLAN = "compile"


@dataclass(frozen=True)
class RegionSource:
    """A layer for the compiler. Code made from a source fits all sources with the same ``digest``."""

    module: fx.GraphModule
    arguments: tuple[Argument, ...]
    token_input: int
    digest: str


def region_source(graph: Graph, target: Target | None) -> RegionSource:
    """The layer in the compile plan of ``graph``, with the kernels of ``target``. ``graph`` stays unchanged.

    Raises:
        UserError: the plan does not fit the graph.
    """
    graph = graph.clone()
    values = [shapes(graph, batch) for batch in range(len(BATCHES))]
    regions = planned_regions(graph, planned_names(graph))
    check_regions(regions, values)
    nodes = regions[0].nodes
    unbound = [(node.target, node.args, dict(node.meta)) for node in nodes]
    for node in nodes:
        kernel = kernel_of(graph, node, target)
        if kernel is not None:
            bind(graph, node, kernel)
    region = Region.of(nodes)  # again: binding changed the region's inputs
    (attention,) = (args for function, args, _ in unbound if function is reference.attention)
    slots = attention[ops.RECORDS["attention"].positions["slot_mapping"]]
    targets = compiler_targets(region, unbound, values[0])
    arguments = tuple(argument(graph, node, values, node is slots) for node in region.inputs)
    text = digest_text(region, targets, arguments)
    return RegionSource(
        region_module(region, targets),
        arguments,
        region.inputs.index(slots),
        hashlib.sha256(text.encode()).hexdigest(),
    )


@dataclass(frozen=True)
class CompiledModel:
    """A bound graph that calls compiled layers, for the steps that ``region`` has code for."""

    module: fx.GraphModule
    region: CompiledRegion

    def serves(self, tokens: int) -> bool:
        return self.region.serves(tokens)


@dataclass(frozen=True)
class CompiledCode:
    """Code for the layers of a graph: its source, and the functions by number of tokens."""

    source: RegionSource
    variants: tuple[Variant, ...]

    def __call__(self, bound: Graph) -> CompiledModel:
        """``bound``, which is used up, with calls of the code in the place of its planned layers."""
        root = nn.Module()
        region = install(bound, root, self.source, self.variants)
        return CompiledModel(graph_module(bound, root), region)


def digest_text(region: Region, targets: Mapping[fx.Node, Any], arguments: Sequence[Argument]) -> str:
    """Everything the generated code depends on besides versions and the machine."""
    numbers = {node: f"%{i}" for i, node in enumerate((*region.inputs, *region.nodes))}
    lines = [f"{a.dtype} {a.device.type} {a.base} {a.per_token} {a.varies}" for a in arguments]
    for node in region.nodes:
        called = targets.get(node, node.target)
        name = ops.op_name(called) or str(called)
        read = fx.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        lines.append(f"{name} {read}")
    return "\n".join([*lines, *(numbers[node] for node in region.outputs)])


def compiler_targets(
    region: Region, unbound: Sequence[tuple[Any, Any, dict[str, Any]]], values: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    """The call of each node inside generated code: the reference, or the kernel as an opaque op."""
    targets: dict[fx.Node, Any] = {}
    for node, (target, args, meta) in zip(region.nodes, unbound, strict=True):
        op = ops.record_of(target)
        packed = {i: values[a] for i, a in enumerate(args) if node.args[i] is not a}
        if op is not None and op.compiled and not packed and "kernel" not in meta:
            targets[node] = target
        elif node.target is not target or (op is not None and not op.traceable):
            targets[node] = operator(target, node.target, packed)
    return targets


def argument(
    graph: Graph, node: fx.Node, values: Sequence[Mapping[fx.Node, Any]], is_slots: bool
) -> Argument:
    """The sizes of a region input, fixed or varying; the slots keep their true number in a padded step."""
    weight = graph.weight_of(node)
    if weight is not None:
        size, value = tuple(weight.shape), weight.value
        none = (0,) * len(size)
        return Argument(value.dtype, value.device, size, none, (False,) * len(size), value)
    first, other, more = (batch[node] for batch in values)
    tokens = BATCHES[0][0].tokens
    per_token = tuple(b - a for a, b in zip(first.shape, more.shape, strict=True))
    base = tuple(a - p * tokens for a, p in zip(first.shape, per_token, strict=True))
    varies = tuple(is_slots or a != b for a, b in zip(first.shape, other.shape, strict=True))
    device = next(iter(graph.weights.values())).stored.device
    return Argument(first.dtype, device, base, per_token, varies)


def install(
    graph: Graph, root: nn.Module, source: RegionSource, variants: Sequence[Variant]
) -> CompiledRegion:
    """Replace each planned region of a bound graph by a call of a shared ``CompiledRegion``."""
    compiled = CompiledRegion(source.arguments, source.token_input, variants)
    root.add_module("region", compiled)
    for region in planned_regions(graph, planned_names(graph)):
        call_region(graph.fx, Region.of(region.nodes))  # again: it may read the region before it
    return compiled


def planned_names(graph: Graph) -> Any:
    """The plan's layers as lists of op names; what is in a file may be anything."""
    plan = graph.annotations[PLAN]
    return plan.get("regions") if isinstance(plan, dict) else None


def planned_regions(graph: Graph, names: Sequence[Sequence[str]]) -> list[Region]:
    """The regions a plan names; their nodes must exist and be contiguous."""
    calls = list(call_nodes(graph))
    position = {node.name: index for index, node in enumerate(calls)}
    regions = []
    if not is_names(names):
        raise UserError("its compile plan is no list of lists of op names", where="graph.json")
    for members in names:
        start = position.get(members[0], 0) if members else 0
        nodes = calls[start : start + len(members)]
        if not members or [node.name for node in nodes] != list(members):
            raise UserError(
                "its compile plan names ops that are not there, in that order", where="graph.json"
            )
        regions.append(Region.of(nodes))
    return regions


def is_names(plan: Any) -> bool:
    """A list of lists of strings."""
    lists = isinstance(plan, list) and all(isinstance(members, list) for members in plan)
    return lists and all(isinstance(name, str) for members in plan for name in members)


def check_regions(regions: Sequence[Region], values: Sequence[Mapping[fx.Node, Any]]) -> None:
    """Refuse regions of different structure, since all run the same code, and regions beyond the compiler.

    Raises:
        UserError: the regions differ, or cannot be compiled.
    """
    if not regions or len({structure(region, values[0]) for region in regions}) > 1:
        raise UserError("its compile plan names layers that are not alike", where="graph.json")
    reason = why_not(regions[0], *values[:2])
    if reason:
        raise UserError(
            f"its compile plan names a layer that can't be compiled: {reason}", where="graph.json"
        )


def region_module(region: Region, targets: Mapping[fx.Node, Any]) -> fx.GraphModule:
    """The region as a function from inputs to the tuple of outputs."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input{i}") for i, node in enumerate(region.inputs)}
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = targets.get(node, node.target)
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule(nn.Module(), graph)


def call_region(graph: fx.Graph, region: Region) -> None:
    """Insert a call of the shared region after the nodes of ``region`` and remove the nodes."""
    with graph.inserting_after(region.nodes[-1]):
        call = graph.call_module("region", region.inputs)
    anchor = call
    for index, node in enumerate(region.outputs):
        with graph.inserting_after(anchor):
            anchor = graph.call_function(getitem, (call, index))
        node.replace_all_uses_with(anchor)
    for node in reversed(region.nodes):
        graph.erase_node(node)

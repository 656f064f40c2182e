"""Bounds of a step: the least time on a target, and the bytes of activations alive at once."""

from __future__ import annotations

from torch import fx

from optkit.graph import ops, variants
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point, infer_shapes
from optkit.lowering.cost import FREE_OPS, as_lowered, bytes_of, node_cost
from optkit.machine.target import Target


def floor_seconds(graph: Graph, point: Point, target: Target) -> float:
    """The least time of a step, by the target's peaks: no kernel, no schedule and no fusion is faster.

    The larger of two times: all arithmetic at the peak of its number type, and one read of weights and KV at the peak
    bandwidth. Activations cost nothing here, and neither does the start of an op; ``cost.predict_seconds`` has both.
    """
    graph = variants.at(graph, point.tokens)
    if target.kind == "cuda":
        graph = as_lowered(graph, target)
    values = infer_shapes(graph, point)
    compute = memory = 0.0
    for node in graph.fx.nodes:
        if node.op != "call_function" or ops.op_name(node.target) in FREE_OPS:
            continue
        cost = node_cost(graph, node, values, point)
        compute += cost.compute_seconds(target)
        memory += cost.weight_bytes + cost.kv_bytes
    return max(compute, memory / target.memory_bandwidth)


def activation_bytes(graph: Graph, point: Point) -> int:
    """Most bytes of values alive at once in a step, op by op: each from its op to its last reader.

    A view has no bytes and keeps its source alive. Kernels' own buffers are not counted.
    """
    graph = variants.at(graph, point.tokens)
    values = infer_shapes(graph, point)
    nodes = list(graph.fx.nodes)
    source: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last[source.get(read, read)] = i
        if node.op == "call_function" and ops.op_name(node.target) in FREE_OPS:
            first = node.all_input_nodes[0]
            source[node] = source.get(first, first)
    ends: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        ends.setdefault(i, []).append(node)
    alive = most = 0.0
    for i, node in enumerate(nodes):
        if node.op == "call_function" and node not in source:
            alive += bytes_of(values[node])
            most = max(most, alive)
        alive -= sum(bytes_of(values[n]) for n in ends.get(i, ()) if n.op == "call_function")
    return int(most)

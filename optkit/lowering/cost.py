"""The cost model: FLOPs and bytes of every op of a step, and the roofline time on a target.

The time of an op is the larger of two times, arithmetic at the target's peak and memory traffic at the target's
bandwidth (Williams et al., CACM 2009), plus a fixed dispatch cost. Weights and KV are read from memory every step;
activations count only when too large for the cache. The prediction is a lower bound for comparison with a pass's
measured gain, not a simulation.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from optkit.graph import ops, variants
from optkit.graph.ir import TWO_FOUR, Graph
from optkit.graph.ops.operands import Role
from optkit.graph.ops.record import Work
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import PLAIN
from optkit.kernels.cpu import native
from optkit.kernels.two_four import STORED

if TYPE_CHECKING:
    from optkit.machine.target import Target

CACHE_BYTES = 1 << 20  # activations below this stay in the last private cache level
FLOPS_A_STATE = 6.0  # of a token, for each element of the state: decay, correction, update, output
SPARSE_DENSITY = "sparse_density"  # annotation: share of the keys that block-sparse prefill reads
# int8 products for one of attention over an int8 cache: two for scores, whose queries have 16 bits, and one for values.
INT8_PRODUCTS = 1.5
SELECTION = 0.08  # work of the choice of keys by block-sparse prefill, as a share of dense attention
DISPATCH_SECONDS = {"cpu": 4e-6, "cuda": 2e-6}  # per op
FREE_OPS = {"getitem", "aten.reshape.default", "aten.transpose.int", "aten.split.Tensor", "aten.slice.Tensor",
            "aten.split_with_sizes.default", "aten.unsqueeze.default", "aten.select.int"}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Work of an op. ``flops`` are float32, ``half_flops`` of 16 bits, ``int8_ops`` of 8, int or float."""

    flops: float = 0.0
    half_flops: float = 0.0
    int8_ops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Bytes moved."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def operations(self) -> float:
        """Arithmetic operations of all types."""
        return self.flops + self.half_flops + self.int8_ops

    def seconds(self, target: Target) -> float:
        """Roofline time on ``target``."""
        return max(self.compute_seconds(target), self.memory_seconds(target))

    def compute_seconds(self, target: Target) -> float:
        """Time of the arithmetic at the target's peak."""
        rates = (
            (self.flops, target.fp32_flops),
            (self.half_flops, target.bf16_flops),
            (self.int8_ops, target.int8_ops),
        )
        return sum(work / rate for work, rate in rates if work and rate)

    def memory_seconds(self, target: Target) -> float:
        """Time of the traffic at the target's bandwidth."""
        return self.num_bytes / target.memory_bandwidth


def node_cost(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Cost of an op at ``point``, given the shapes of all values there."""
    op = ops.record_of(node.target)
    return RULES[op.work if op else Work.POINTWISE](graph, node, values, point)


def predict_seconds(graph: Graph, point: Point, target: Target, fused: Container[str] = ()) -> float:
    """Predicted time of a step: roofline of each op, plus dispatch of the ops that are not in ``fused``, by node name.

    For a GPU the graph is rewritten and narrowed to bfloat16 first, as in lowering.
    """
    graph = variants.at(graph, point.tokens)
    if target.kind == "cuda":
        graph = as_lowered(graph, target)
    values = infer_shapes(graph, point)
    total = 0.0
    for node in graph.fx.nodes:
        if node.op == "call_function" and ops.op_name(node.target) not in FREE_OPS:
            total += node_cost(graph, node, values, point).seconds(target)
            total += 0.0 if node.name in fused else DISPATCH_SECONDS[target.kind]
    return total


def as_lowered(graph: Graph, target: Target) -> Graph:
    """``graph`` without values, rewritten and narrowed as by ``lower`` for a GPU."""
    from optkit.lowering import gpu_rewrites, precision

    planned = graph.clone()
    for weight in planned.weights.values():
        weight.value = weight.on_meta()
    gpu_rewrites.rewrite(planned, target)
    precision.narrow(planned, torch.bfloat16, "meta")
    return planned


def products(count: float, x: Tensor) -> dict[str, float]:
    """FLOPs of products with activations ``x``, by the units for their dtype."""
    return {"half_flops" if x.dtype in (torch.bfloat16, torch.float16) else "flops": count}


# -- rules -----------------------------------------------------------------------------------------------


def bytes_of(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(v) for v in value)
    return 0.0


def traffic(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[float, float]:
    """Weight bytes, and activation bytes beyond the cache, moved by an op."""
    inputs = node.all_input_nodes
    weights = sum(bytes_of(values[i]) for i in inputs if i.op == "get_attr")
    moved = [bytes_of(values[i]) for i in inputs if i.op == "call_function"] + [bytes_of(values[node])]
    return weights, sum(size for size in moved if size > CACHE_BYTES)


def pointwise(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    weights, activations = traffic(graph, node, values)
    return Cost(flops=bytes_of(values[node]) / 4, weight_bytes=weights, activation_bytes=activations)


def embedding(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    return Cost(activation_bytes=2 * bytes_of(values[node]))


def linear(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    weights, activations = traffic(graph, node, values)
    out, k, flops = values[node], values[ops.weight(node)].shape[1], 2.0
    if out.dtype != torch.float32 and node.name in graph.annotations.get(TWO_FOUR, ()):
        flops, weights = flops / 2, weights * STORED
    work = products(flops * out.numel() * k, values[ops.activation(node)])
    return Cost(**work, weight_bytes=weights, activation_bytes=activations)


def integer_linear(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """int8 products, whatever the weights are stored as."""
    weights, activations = traffic(graph, node, values)
    out, k = values[node], values[ops.activation(node)].shape[1]
    return Cost(int8_ops=2.0 * out.numel() * k, weight_bytes=weights, activation_bytes=activations)


def weight_only_linear(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Products of float activations and quantized weights.

    On a CPU, activations of 16 bits are two int8 rows each; with ``precision="bfloat16"`` a CPU with AMX multiplies
    bfloat16. A GPU multiplies 16-bit floats.
    """
    weights, activations = traffic(graph, node, values)
    out, x = values[node], values[ops.activation(node)]
    k = x.shape[-1]
    tiles = node.kwargs.get("precision") == "bfloat16" and native.multiplies_bfloat16()
    if x.dtype != torch.float32 or tiles:
        return Cost(half_flops=2.0 * out.numel() * k, weight_bytes=weights, activation_bytes=activations)
    return Cost(int8_ops=4.0 * out.numel() * k, weight_bytes=weights, activation_bytes=activations)


def experts(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Products of a row for each token and expert; of the weights, those of the expected number of distinct experts.

    With each token's J of E experts drawn evenly, T tokens have ``E * (1 - (1 - J / E)^T)`` distinct experts.
    """
    op, out, x = ops.op_of(node), values[node], values[ops.activation(node)]
    count, each = ops.argument(node, "num_experts"), out.shape[1]
    read = 1.0 - (1.0 - min(1.0, each / count)) ** out.shape[0]
    operands = [op.argument(node, operand.name) for operand in op.stored] or [ops.weight(node)]
    weights = read * sum(bytes_of(values[operand]) for operand in operands if operand is not None)
    flops = 2.0 * out.numel() * x.shape[-1]
    if op.quantizes_input:
        return Cost(int8_ops=flops, weight_bytes=weights)
    if op.stored and x.dtype == torch.float32:
        return Cost(int8_ops=2.0 * flops, weight_bytes=weights)  # two int8 rows each
    return Cost(**products(flops, x), weight_bytes=weights)


def heads(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Of the weight, the rows that the op reads."""
    out, x, weight = values[node], values[ops.activation(node)], values[ops.weight(node)]
    count, first, last = (ops.argument(node, name) for name in ("num_heads", "first", "last"))
    _, activations = traffic(graph, node, values)
    return Cost(
        **products(2.0 * out.numel() * x.shape[-1], x),
        weight_bytes=bytes_of(weight) * count * (last - first) / weight.shape[0],
        activation_bytes=activations,
    )


def attention(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Pairs of (query, visible key): in a chunk of n tokens with context c at the end a query sees c - (n - 1) / 2
    keys.
    """
    q, v = (values[ops.argument(node, name)] for name in ("q", "v"))
    pools = [
        values[pool] for name in ("k_cache", "v_cache") if (pool := ops.argument(node, name)) is not None
    ]
    new = point.tokens / point.sequences
    seen = point.context - (new - 1) / 2
    window = ops.argument(node, "window") or point.context
    if chunk := ops.argument(node, "chunk"):
        window = min(
            window, chunk / 2 if point.context > chunk else chunk
        )  # the mean over the places in a chunk
    pairs = point.tokens * min(seen, window)
    if ops.argument(node, "sparse_cover") and new > 1:
        pairs -= point.sequences * spared_pairs(graph, node, point.context, new)
    per_token = sum(pool.shape[2] * pool.shape[3] * pool.element_size() for pool in pools)
    kv = point.sequences * min(point.context, window + new) * per_token
    flops = 2.0 * pairs * q.shape[1] * (q.shape[2] + v.shape[2])
    on_int8 = q.dtype == torch.float32 and any(pool.dtype == torch.int8 for pool in pools)
    if on_int8 and node.meta.get("kernel") != PLAIN:
        return Cost(int8_ops=INT8_PRODUCTS * flops, kv_bytes=kv)
    return Cost(**products(flops, q), kv_bytes=kv)


def spared_pairs(graph: Graph, node: fx.Node, context: float, new: float) -> float:
    """The pairs that block-sparse prefill leaves out for the last ``new`` of ``context`` tokens of a sequence, less
    the work of the choice.
    """
    density = float(graph.annotations.get(SPARSE_DENSITY, 1.0))
    first = min(context, max(context - new, ops.argument(node, "sparse_from")))
    return max(0.0, 1.0 - density - SELECTION) * (context**2 - first**2) / 2


def recurrent(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> Cost:
    """Each token decays, advances and reads each element of its sequence's state; a call reads and writes the state."""
    record = ops.op_of(node)
    pool = next(record.argument(node, o.name) for o in record.tensors if o.role is Role.STATE)
    state = values[pool][0]
    weights, activations = traffic(graph, node, values)
    return Cost(
        flops=FLOPS_A_STATE * point.tokens * state.numel(),
        weight_bytes=weights,
        kv_bytes=2.0 * point.sequences * state.nbytes,
        activation_bytes=activations,
    )


RULES = {
    Work.POINTWISE: pointwise,
    Work.GATHER: embedding,
    Work.LINEAR: linear,
    Work.LINEAR_8BIT: integer_linear,
    Work.LINEAR_WEIGHT_ONLY: weight_only_linear,
    Work.EXPERTS: experts,
    Work.HEADS: heads,
    Work.ATTENTION: attention,
    Work.RECURRENT: recurrent,
}

"""Predicted time of a step: the work of each op, at the share of each ceiling that kernels reach.

A step has chunks of prompts, decodes, or both. Ops on rows (linear layers, norms) see all tokens of a step; attention
sees each sequence by itself, so its work is summed over chunks and decodes. An op takes the longer of
arithmetic and memory traffic, or the sum of both where kernels work in turns (``optkit.plan.shares``). The sum over
ops, with the fixed times of a step, is the prediction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from optkit.graph import ops, variants
from optkit.graph.ir import Graph
from optkit.graph.ops.record import Work
from optkit.graph.shapes import Point, infer_shapes
from optkit.kernels import PLAIN
from optkit.lowering.compiled.hook import fused_nodes
from optkit.lowering.cost import DISPATCH_SECONDS, FREE_OPS, Cost, as_lowered, node_cost
from optkit.machine.target import Target
from optkit.plan.shares import Shares, Unit, shares_of

BY_SEQUENCE = (Work.ATTENTION, Work.RECURRENT)  # ops whose work depends on the sequences of a step
INT4_BYTES = 0.75  # of a weight, with its scales: below, the weights are of four bits


Step = tuple[Point, ...]  # the work of a step: chunks of prompts, and decodes of equal contexts


@dataclass
class StepTime:
    """The predicted time of a step in seconds, with its work.

    Attributes:
        compute: seconds of ops bound by arithmetic, by unit.
        weights, kv, activations: seconds of ops bound by memory, by the tensors read.
        overhead: seconds of the dispatch of ops.
        engine: seconds of scheduler, sampling and tables.
        floor: seconds at the full ceilings without overhead, the roofline.
    """

    compute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    weights: float = 0.0
    kv: float = 0.0
    activations: float = 0.0
    overhead: float = 0.0
    engine: float = 0.0
    floor: float = 0.0
    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by cause."""
        memory = {
            "reading weights": self.weights,
            "reading KV": self.kv,
            "moving activations": self.activations,
            "dispatch": self.overhead,
            "engine": self.engine,
        }
        return {**{f"{unit} arithmetic": time for unit, time in self.compute.items()}, **memory}

    @property
    def bound(self) -> str:
        """The cause of most of the time."""
        return max(self.parts, key=lambda name: self.parts[name])

    def scale(self, factor: float) -> None:
        """Multiply the seconds of the model by ``factor``; the engine's own time and the floor stay."""
        for unit in self.compute:
            self.compute[unit] *= factor
        for name in ("weights", "kv", "activations", "overhead"):
            setattr(self, name, getattr(self, name) * factor)

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def to_dict(self) -> dict[str, Any]:
        parts = {name: seconds for name, seconds in self.parts.items() if seconds}
        return {
            "seconds": self.seconds,
            "floor_seconds": self.floor,
            "flops": self.flops,
            "bytes": self.num_bytes,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "bound_by": self.bound,
            "parts": parts,
        }


class OpCost(NamedTuple):
    """The cost of an op on a unit.

    Attributes:
        fixed: seconds of its dispatch.
        packs: True where the kernel copies the weights into another order first.
    """

    unit: Unit
    cost: Cost
    fixed: float
    packs: bool = False


class StepModel:
    """Predicts steps of ``graph`` on ``target``, at ``shares`` of its ceilings."""

    def __init__(self, graph: Graph, target: Target, shares: Shares | None = None) -> None:
        self.target, self.shares = target, shares or shares_of(target)
        self.source = graph
        self.graph = as_lowered(graph, target) if target.kind == "cuda" else graph
        self.fused = fused_nodes(graph)
        self.rows = lru_cache(maxsize=None)(self._rows)
        self.by_sequence = lru_cache(maxsize=1024)(self._by_sequence)
        self.headed = lru_cache(maxsize=None)(self._headed)

    def with_engine(self, step: float, row: float) -> StepModel:
        """The same model with seconds of the engine for a step, and for each sequence in the step."""
        shares = replace(self.shares, step_seconds=step, row_seconds=row)
        return StepModel(self.source, self.target, shares)

    def step(self, step: Step) -> StepTime:
        """The predicted time of ``step``."""
        tokens, sequences = sum(p.tokens for p in step), sum(p.sequences for p in step)
        found = StepTime()
        for op, count in self.rows(tokens, sequences).items():
            self._add(found, op, count)
        for point in step:
            for op, count in self.by_sequence(self._variant(tokens), point).items():
                self._add(found, op, count)
        found.engine += self.shares.step_seconds + self.shares.row_seconds * sequences
        return found

    def prefill(self, tokens: int, budget: int, before: int = 0) -> StepTime:
        """The predicted time of a prompt of ``tokens`` tokens after ``before``, in chunks of ``budget`` tokens."""
        sizes = [min(budget, tokens - start) for start in range(0, tokens, budget)]
        total, done = StepTime(), before
        for size in sizes:
            done += size
            add(total, self.step((Point(size, 1, done),)))
        return total

    def decode(self, sequences: int, context: int) -> StepTime:
        """The predicted time of a token of each of ``sequences`` sequences of ``context`` tokens."""
        return self.step((Point(sequences, sequences, context),))

    def at(self, point: Point, budget: int) -> StepTime:
        """The predicted time of a workload point."""
        if point.is_decode:
            return self.decode(point.sequences, point.context)
        return self.prefill(point.tokens, budget, point.context - point.tokens)

    def _variant(self, tokens: int) -> int:
        """A number of tokens with the same variant of the layers as ``tokens``."""
        limits = variants.limits(self.graph)
        return next((limit for limit in limits if tokens <= limit), max(limits, default=0) + 1)

    def _rows(self, tokens: int, sequences: int) -> Counter[OpCost]:
        """The ops on rows in steps of ``tokens`` tokens of ``sequences`` sequences; equal ops of layers together."""
        graph, point = variants.at(self.graph, tokens), Point(tokens, sequences, max(2, tokens))
        values = infer_shapes(graph, point)
        return Counter(
            self._op(graph, node, values, point) for node in calls(graph) if work_of(node) not in BY_SEQUENCE
        )

    def _by_sequence(self, variant: int, point: Point) -> Counter[OpCost]:
        """The ops on sequences at ``point``."""
        graph, values = self.headed(variant)
        return Counter(
            self._op(graph, node, values, point) for node in calls(graph) if work_of(node) in BY_SEQUENCE
        )

    def _headed(self, variant: int) -> tuple[Graph, Mapping[fx.Node, Any]]:
        """The layers in ``variant``, with shapes at an arbitrary point: only sizes of heads are read."""
        graph = variants.at(self.graph, variant)
        return graph, infer_shapes(graph, Point(1, 1, 2))

    def _op(self, graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any], point: Point) -> OpCost:
        """The cost of ``node`` at ``point``."""
        unit = unit_of(node, values)
        seconds = self.shares.calls.get(unit, self.shares.call_seconds)
        fixed = DISPATCH_SECONDS[self.target.kind] if seconds is None else seconds
        cost = node_cost(graph, node, values, point)
        return OpCost(unit, cost, 0.0 if node.name in self.fused else fixed, self._packs(unit, node, values))

    def _packs(self, unit: Unit, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
        """True where the kernel copies the weights into another order first: of several rows, on some units."""
        return unit in self.shares.packing and values[node].numel() > values[node].shape[-1]

    def _add(self, total: StepTime, op: OpCost, count: int) -> None:
        cost, target = op.cost, self.target
        arithmetic = compute_seconds(op.unit, cost, target)
        traffic = {
            "weights": cost.weight_bytes / target.memory_bandwidth,
            "kv": cost.kv_bytes / target.memory_bandwidth,
            "activations": cost.activation_bytes / target.memory_bandwidth,
        }
        compute = arithmetic / self.shares.compute.get(op.unit, self.shares.other)
        reached = self.shares.bandwidth.get(op.unit, self.shares.reading)
        memory = sum(traffic.values()) / reached
        in_turns = op.unit in self.shares.in_turns
        if in_turns or compute >= memory:
            total.compute[op.unit.value] += count * compute
        if in_turns or compute < memory:
            for name, seconds in traffic.items():
                setattr(total, name, getattr(total, name) + count * seconds / reached)
        if op.packs:
            total.weights += count * self.shares.packing[op.unit] * traffic["weights"] / reached
        total.floor += count * max(arithmetic, sum(traffic.values()))
        total.overhead += count * op.fixed
        total.flops += count * (cost.flops + cost.half_flops + cost.int8_ops)
        total.weight_bytes += count * cost.weight_bytes
        total.kv_bytes += count * cost.kv_bytes
        total.activation_bytes += count * cost.activation_bytes


def add(total: StepTime, other: StepTime) -> None:
    """Add ``other`` to ``total``."""
    for one in fields(StepTime):
        if one.name == "compute":
            for unit, seconds in other.compute.items():
                total.compute[unit] += seconds
        else:
            setattr(total, one.name, getattr(total, one.name) + getattr(other, one.name))


def calls(graph: Graph) -> list[fx.Node]:
    """The calls with a cost."""
    return [n for n in graph.fx.nodes if n.op == "call_function" and ops.op_name(n.target) not in FREE_OPS]


def work_of(node: fx.Node) -> Work:
    op = ops.record_of(node.target)
    return op.work if op else Work.POINTWISE


def unit_of(node: fx.Node, values: Mapping[fx.Node, Any]) -> Unit:
    """The unit on which the op runs."""
    work = work_of(node)
    if work is Work.ATTENTION:
        return attention_unit(node, values)
    if work in (Work.POINTWISE, Work.GATHER, Work.RECURRENT):
        return Unit.OTHER
    op = ops.op_of(node)
    weight, x = values[ops.weight(node)], values[ops.activation(node)]
    if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return Unit.FP8
    if work is Work.LINEAR_8BIT or op.quantizes_input:
        out, columns = values[node], x.shape[-1]
        few_bits = weight.nbytes <= INT4_BYTES * out.shape[-1] * columns
        return Unit.INT4 if few_bits else Unit.INT8
    if op.stored:
        return Unit.WEIGHT_ONLY
    return Unit.FLOAT if x.dtype == torch.float32 else Unit.HALF


def attention_unit(node: fx.Node, values: Mapping[fx.Node, Any]) -> Unit:
    """The unit of attention, by kernel and type of the KV cache."""
    if node.meta.get("kernel") == PLAIN:
        return Unit.PLAIN_ATTENTION
    pool = values[ops.argument(node, "k_cache")]
    return Unit.ATTENTION_INT8 if pool.dtype == torch.int8 else Unit.ATTENTION


def compute_seconds(unit: Unit, cost: Cost, target: Target) -> float:
    """Seconds of the arithmetic of ``cost`` at the peak rates; a type without units runs as float32."""
    eight = target.fp8_flops if unit is Unit.FP8 else target.int8_ops
    rates = (target.fp32_flops, target.bf16_flops, eight)
    work = (cost.flops, cost.half_flops, cost.int8_ops)
    return sum(count / (rate or target.fp32_flops) for count, rate in zip(work, rates, strict=True))

"""Precision: a float32 graph becomes a graph in bfloat16 or float16 for GPUs.

Capture, passes and the reference are float32; the dtype of a target is a matter of lowering. ``narrow`` starts at the
embedding and follows the types through the graph, on meta tensors. A matrix product takes the weight in the type of the
activations, and so does any plain op with a promotion otherwise. Float32 inputs of kernels stay float32: norm weights,
rotary angles, scales. Logits come out float32. KV pools get the type too, unless a pass chose another.

An op without a kernel runs the reference in float32 and rounds once, at the end (``rounded``), like a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph, Weight
from optkit.graph.shapes import MetaRun, Point
from optkit.graph.states import KVSpec
from optkit.graph.variants import SharedWeights
from optkit.kernels import reference

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CAST = torch.ops.aten._to_copy.default
# No two sizes are equal, and none is 1, which would broadcast.
PROBE, PROBE_BLOCK = Point(tokens=11, sequences=3, context=37), 5


def narrow(
    graph: Graph,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    shared: SharedWeights | None = None,
) -> None:
    """Make ``graph`` compute in ``dtype`` on ``device``, in place; ``torch.float32`` only moves the weights."""
    shared = shared or SharedWeights()
    if dtype != torch.float32:
        follow(graph, dtype, torch.device(device), shared)
    move(graph, torch.device(device), shared)


def compute_dtype(name: str) -> torch.dtype:
    """``bfloat16``, ``float16`` or ``float32``."""
    return HALF.get(name, torch.float32)


def follow(graph: Graph, dtype: torch.dtype, device: torch.device, shared: SharedWeights) -> None:
    graph.meta = graph.meta.with_kv_specs(narrow_spec(spec, dtype) for spec in graph.meta.kv_specs)
    for node in graph.calls(reference.embedding):
        narrowed = narrow_weight(graph, ops.weight(node), node, dtype, device, shared)
        node.replace_input_with(ops.weight(node), narrowed)
    Narrowing(graph, dtype, device, shared)
    graph.prune()


def move(graph: Graph, device: torch.device, shared: SharedWeights) -> None:
    """Move all weights to ``device``; shared memory stays shared."""
    moved: dict[tuple[Hashable, int, torch.Size], Tensor] = {}
    for name, weight in graph.weights.items():
        if not weight.is_meta:
            key = (address(weight), weight.nbytes, weight.shape)
            there = shared.once(("moved", name), [name], partial(moved_to, weight, device))
            weight.value = moved.setdefault(key, there)


def address(weight: Weight) -> Hashable:
    return weight.stored.data_ptr() if isinstance(weight.stored, Tensor) else weight.memory


def moved_to(weight: Weight, device: torch.device) -> Tensor:
    return weight.value.to(device)


def narrow_spec(spec: KVSpec, dtype: torch.dtype) -> KVSpec:
    name = str(dtype).removeprefix("torch.")
    return replace(spec, dtype=name) if spec.dtype == "float32" else spec


def narrow_weight(
    graph: Graph,
    weight: fx.Node,
    before: fx.Node,
    dtype: torch.dtype,
    device: torch.device,
    shared: SharedWeights,
) -> fx.Node:
    """The weight of node ``weight`` in ``dtype``, made once, on the device, and shared by all readers."""
    wide = str(weight.target)
    name = f"{wide}.{str(dtype).removeprefix('torch.')}"
    if name not in graph.weights:
        old = graph.weights[wide]
        place = "meta" if old.is_meta else device
        value = shared.once(("narrowed", name), [wide], lambda: old.value.to(place).to(dtype), name)
        graph.weights[name] = Weight(value, old.origin)
    return graph.weight_node(name, before)


class Narrowing(MetaRun):
    """A run on types: casts are inserted where types would mix."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device, shared: SharedWeights) -> None:
        self.dtype, self.device, self.shared = dtype, device, shared
        super().__init__(graph, PROBE, PROBE_BLOCK)
        self.cast_logits()

    def value(self, node: fx.Node) -> Any:
        if node.op == "call_function":
            self.agree(node)
            op = ops.record_of(node.target)
            if op is not None and "dtype" in op.positions:
                node.kwargs = {**node.kwargs, "dtype": str(self.dtype).removeprefix("torch.")}
        value = super().value(node)
        return self.cast_product(node, value)

    def agree(self, node: fx.Node) -> None:
        """Give plain ops and matrix products all float arguments in the same type."""
        op = ops.record_of(node.target)
        if op is not None and not op.any_dtype:
            return
        inputs = [i for i in node.all_input_nodes if is_float(self.values[i])]
        if self.dtype not in {self.values[i].dtype for i in inputs}:
            return
        for wide in (i for i in inputs if self.values[i].dtype == torch.float32):
            if wide.op == "get_attr":
                narrowed = narrow_weight(self.graph, wide, node, self.dtype, self.device, self.shared)
            else:
                with self.graph.fx.inserting_before(node):
                    narrowed = self.graph.fx.call_function(CAST, (wide,), {"dtype": self.dtype})
            self.values[narrowed] = self.values[wide].to(self.dtype)
            node.replace_input_with(wide, narrowed)

    def cast_product(self, node: fx.Node, value: Any) -> Any:
        """Round a product or a row of quantized numbers after the op, where the op only gives float32."""
        name = ops.op_name(node.target) if node.op == "call_function" else None
        if (
            name
            and name.startswith(("linear", "embedding"))
            and is_float(value)
            and value.dtype == torch.float32
        ):
            with self.graph.fx.inserting_after(node):
                narrowed = self.graph.fx.call_function(CAST, (node,), {"dtype": self.dtype})
            node.replace_all_uses_with(narrowed, delete_user_cb=lambda user: user is not narrowed)
        return value

    def cast_logits(self) -> None:
        output = next(node for node in self.graph.fx.nodes if node.op == "output")
        logits = output.args[0]
        if self.values[logits].dtype != torch.float32:
            with self.graph.fx.inserting_before(output):
                wide = self.graph.fx.call_function(CAST, (logits,), {"dtype": torch.float32})
            output.replace_input_with(logits, wide)


def round_references(graph: Graph, dtype: torch.dtype) -> None:
    """After kernels are bound: what still calls a float32 reference computes in float32 and rounds (``rounded``)."""
    for node in graph.fx.nodes:
        op = ops.record_of(node.target) if node.op == "call_function" else None
        if op is not None and not op.any_dtype:
            inputs = [isinstance(a, fx.Node) and a.op == "placeholder" for a in node.args]
            in_place = frozenset(i for i, is_input in enumerate(inputs) if is_input)
            node.target = rounded(node.target, dtype, in_place)


def is_float(value: Any) -> bool:
    """True for what type promotion looks at: a tensor of floats with a dimension."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.dtype in (torch.float32, *HALF.values())


def rounded(fn: Callable[..., Any], dtype: torch.dtype, in_place: frozenset[int]) -> Callable[..., Any]:
    """``fn``, a float32 reference, for arguments of ``dtype``: computation in float32, results rounded to the
    declared type.

    ``in_place`` are the positions of tensors written by ``fn``, which are passed as they are. A result declared
    float32 by the op's shape rule (rotary angles, scales) stays float32.
    """
    rule = ops.shape_rule(fn)

    def widened(value: Any, position: int) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype == dtype and position not in in_place
        return value.to(torch.float32) if narrow else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            declared = rule(*map(on_meta, args), **kwargs)
        results = fn(*(widened(value, i) for i, value in enumerate(args)), **kwargs)
        if isinstance(results, Tensor):
            return results.to(declared.dtype)
        return tuple(r.to(d.dtype) for r, d in zip(results, declared, strict=True))

    return run


def on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value

"""Measured times of kernels: the cost model's rates on the machine at hand.

Nodes of equal op, kernel, shapes and options are a *kind*. A kind is measured once per machine: some of its nodes run
alone, as in a step of the model. In steps of few tokens the weights come from memory and not from the cache, where the
whole model is larger than the cache. The prediction for a step is the sum over all nodes, and the time of a step
without ops. Times are kept in a file for each machine, instruction set, number of threads, version of torch and build
of the native kernels.

A node that can't run alone, for a shape without a row a token or for the size of its weights, has the roofline time
(``optkit.lowering.cost``).
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from optkit.evaluation.speed import step_function, timed
from optkit.graph import ops, variants
from optkit.graph.ir import Graph, Weight
from optkit.graph.shapes import Point, infer_shapes, signature
from optkit.kernels import reference
from optkit.lowering.cost import FREE_OPS, node_cost
from optkit.lowering.lower import lower
from optkit.machine.paths import cache_dir, replace_text
from optkit.machine.target import Target, cpu_model
from optkit.recipe.schema import Recipe

REPEATS = 5  # the shortest counts: a disturbance only adds time
FEW_TOKENS = 32  # in a step that waits for weights from memory; in larger steps arithmetic hides the reading
BUDGET_SECONDS = 0.02  # of roofline time in a measurement of a kind
MAX_NODES, MAX_BYTES = 64, 512 << 20  # of a kind in a measurement
LEAF_ROWS = 8  # rows of the table behind an activation
RESHAPE = ops.aten("reshape.default")


class KernelTimes:
    """Seconds of the kinds of nodes on ``target``, the CPU at hand, for steps sized by ``recipe``."""

    def __init__(self, target: Target, recipe: Recipe) -> None:
        self.target, self.recipe = target, recipe
        self.file = times_file()
        self.seconds = read_times(self.file)

    def step_seconds(self, graph: Graph, point: Point) -> float:
        """Predicted time of a step of ``graph`` at ``point``."""
        graph = variants.at(graph, point.tokens)
        values = infer_shapes(graph, point, self.recipe.runtime.block_size)
        cold = point.tokens <= FEW_TOKENS and graph.num_bytes() > cache_bytes()
        known = len(self.seconds)
        total = self.empty(graph, values, point, cold)
        for kind, nodes in kinds(graph, values).items():

            def work(nodes: list[fx.Node] = nodes) -> float:
                return self.alone(graph, nodes, values, point, cold)

            total += len(nodes) * self.of(kind, work, point, cold)
        if len(self.seconds) > known:
            replace_text(self.file, json.dumps(self.seconds, indent=1) + "\n")
        return total

    def of(self, kind: str, measure: Callable[[], float], point: Point, cold: bool) -> float:
        """Seconds of a node of ``kind``, measured if unknown."""
        budget = self.recipe.runtime.max_num_batched_tokens
        key = f"{kind} at {point.label} of {point.sequences}{' cold' if cold else ''}, chunks of {budget}"
        if key not in self.seconds:
            self.seconds[key] = measure()
        return self.seconds[key]

    def alone(
        self, graph: Graph, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], point: Point, cold: bool
    ) -> float:
        """Seconds of a node of ``nodes``, which are of one kind."""
        roofline = node_cost(graph, nodes[0], values, point).seconds(self.target)
        if weight_bytes(graph, nodes[0]) > MAX_BYTES:
            return roofline
        chosen = nodes[: self.count(graph, nodes, roofline)]
        try:
            whole = self.measure(graph, chosen, values, point, cold)
        except Unmeasurable:
            return roofline
        return max(whole - self.empty(graph, values, point, cold), 0.0) / len(chosen)

    def empty(self, graph: Graph, values: Mapping[fx.Node, Any], point: Point, cold: bool) -> float:
        """Seconds of a step without ops."""
        return self.of("empty", lambda: self.measure(graph, [], values, point, cold), point, cold)

    def count(self, graph: Graph, nodes: Sequence[fx.Node], roofline: float) -> int:
        """Number of ``nodes`` to measure together: enough for a clock, few enough for time and memory."""
        in_time = int(BUDGET_SECONDS / max(roofline, 1e-7))
        in_memory = MAX_BYTES // max(weight_bytes(graph, nodes[0]), 1)
        return max(1, min(len(nodes), MAX_NODES, in_time, in_memory))

    def measure(
        self, graph: Graph, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], point: Point, cold: bool
    ) -> float:
        """Seconds of a step with ``nodes`` alone."""
        part = Extract(graph, values, point).graph_of(nodes)
        step = step_function(lower(part, self.target, consume=True), point, self.recipe)
        step()
        samples = []
        for _ in range(REPEATS):
            if cold:
                evict()
            samples.append(timed(step, 1))
        return min(samples)


def weight_bytes(graph: Graph, node: fx.Node) -> int:
    """Bytes of the weights that ``node`` reads."""
    return sum(w.value.nbytes for n in node.all_input_nodes if (w := graph.weight_of(n)))


def kinds(graph: Graph, values: Mapping[fx.Node, Any]) -> dict[str, list[fx.Node]]:
    """The computing nodes of ``graph`` by kind, in order; a node whose result is a number takes no time."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.fx.nodes:
        if node.op != "call_function" or ops.op_name(node.target) in FREE_OPS:
            continue
        if not isinstance(values[node], int):
            found.setdefault(kind_of(graph, node, values), []).append(node)
    return found


def kind_of(graph: Graph, node: fx.Node, values: Mapping[fx.Node, Any]) -> str:
    """The op, the pinned kernel, and shapes, dtypes and plain values of the arguments."""
    given = fx.map_arg((node.args, node.kwargs), lambda n: shape_text(values[n]))
    digest = hashlib.sha256(repr((given, graph.site_options(node))).encode()).hexdigest()[:12]
    shapes = [shape_text(values[n]) for n in node.all_input_nodes]
    return f"{ops.op_name(node.target)}:{node.meta.get('kernel', 'best')} {' '.join(shapes)} {digest}"


def shape_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(signature(value))


# -- a graph with some nodes of another --------------------------------------------------------------------


class Unmeasurable(Exception):
    """A node that can't run alone."""


class Extract:
    """Makes a graph with some nodes of ``source``; activations come from rows of a small table.

    Operands of other types than float32, such as quantized activations, are computed by their own nodes.
    """

    def __init__(self, source: Graph, values: Mapping[fx.Node, Any], point: Point) -> None:
        self.source, self.values, self.point = source, values, point
        self.fx = fx.Graph()
        self.weights: dict[str, Weight] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.leaves: dict[tuple[int, ...], fx.Node] = {}

    def graph_of(self, nodes: Sequence[fx.Node]) -> Graph:
        """The graph of ``nodes``, with all results as output.

        Raises:
            Unmeasurable: an activation is empty, or has no row for each token or each row of logits.
        """
        for node in self.source.fx.find_nodes(op="placeholder"):
            self.copies[node] = self.fx.placeholder(str(node.target))
        results = [result for node in nodes for result in self.results(node)]
        self.fx.output(tuple(results) or (self.leaf(torch.empty(self.point.tokens, 8, device="meta")),))
        used = {str(n.target) for n in self.fx.find_nodes(op="placeholder") if n.users}
        specs = self.source.meta.kv_specs
        kept = tuple(s for s in specs if f"k_cache_{s.layer}" in used) or specs[:1]
        names = {f"{side}_cache_{s.layer}" for s in kept for side in "kv"}
        for node in self.fx.find_nodes(op="placeholder"):
            if "_cache_" in str(node.target) and node.target not in names:
                self.fx.erase_node(node)
        meta = replace(self.source.meta, kv_specs=kept, vocab_size=LEAF_ROWS)
        return Graph(self.fx, self.weights, meta)

    def results(self, node: fx.Node) -> Iterator[fx.Node]:
        """The copied tensor results of ``node``."""
        copy = self.node_copy(node)
        value = self.values[node]
        if isinstance(value, Tensor):
            yield copy
        else:
            for index in range(len(value)):
                yield self.fx.call_function(operator.getitem, (copy, index))

    def node_copy(self, node: fx.Node) -> fx.Node:
        copy = self.fx.node_copy(node, self.operand)
        copy.meta = dict(node.meta)
        return copy

    def operand(self, node: fx.Node) -> fx.Node:
        """The stand-in for an operand of a copied node."""
        if node not in self.copies:
            value = self.values[node]
            if node.op == "get_attr":
                self.weights[str(node.target)] = filled(self.source.weights[str(node.target)])
                self.copies[node] = self.fx.get_attr(str(node.target))
            elif isinstance(value, Tensor) and value.dtype == torch.float32:
                self.copies[node] = self.leaf(value)
            else:
                self.copies[node] = self.node_copy(node)
        return self.copies[node]

    def leaf(self, value: Tensor) -> fx.Node:
        """An activation of the shape of ``value``: float32, rows of tokens or of logits."""
        shape = tuple(value.shape)
        if 0 in shape or shape[:1] not in ((self.point.tokens,), (self.point.sequences,)):
            raise Unmeasurable(shape)
        if shape not in self.leaves:
            width = math.prod(shape[1:])
            name = f"leaf{len(self.leaves)}"
            self.weights[name] = Weight(torch.full((LEAF_ROWS, width), 0.01), None)
            ids, index = (self.input(name) for name in ("input_ids", "logits_index"))
            rows = self.fx.call_function(reference.embedding, (self.fx.get_attr(name), ids))
            if shape[0] != self.point.tokens:
                rows = self.fx.call_function(reference.select_rows, (rows, index))
            if len(shape) != 2:
                rows = self.fx.call_function(RESHAPE, (rows, [-1, *shape[1:]]))
            self.leaves[shape] = rows
        return self.leaves[shape]

    def input(self, name: str) -> fx.Node:
        return next(n for n in self.fx.find_nodes(op="placeholder") if n.target == name)


def filled(weight: Weight) -> Weight:
    """``weight``; small numbers in place of a weight on the meta device, since a dry run reads none."""
    value = weight.value
    if value.device.type != "meta":
        return Weight(value, None)
    if value.dtype.is_floating_point:
        return Weight(torch.full(value.shape, 0.01, dtype=value.dtype), None)
    return Weight(torch.ones(value.shape, dtype=value.dtype), None)


# -- caches ------------------------------------------------------------------------------------------------


def cache_bytes() -> int:
    """Bytes of the last cache level; 32 MiB where the system does not say."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or 32 << 20
    except (ValueError, OSError):
        return 32 << 20


@lru_cache(maxsize=1)
def other_data() -> np.ndarray:
    return np.zeros(max(64 << 20, 2 * cache_bytes()) // 4, dtype=np.float32)


def evict() -> None:
    """Fill the caches with other data, on one thread: torch's threads would go on spinning into the measurement."""
    np.add(other_data(), 1, out=other_data())


# -- the file ----------------------------------------------------------------------------------------------


def times_file() -> Path:
    """The file of times of this machine, instruction set, threads, torch and native kernels."""
    from optkit.kernels.cpu import native

    built = hashlib.sha256(native.library_file().read_bytes()).hexdigest() if native.available() else ""
    facts = [cpu_model(), native.isa() if built else "", torch.get_num_threads(), torch.__version__, built]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_dir("kernel-times") / f"{digest}.json"


def read_times(file: Path) -> dict[str, float]:
    """The kept times; none if the file is missing or damaged."""
    try:
        data = json.loads(file.read_text("utf-8"))
        return {str(k): float(v) for k, v in data.items() if math.isfinite(v) and v >= 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

"""Short models: a graph with some of its layers, for measurements that stand for the whole.

The calls of a graph are cut after each attention op but the last. The part up to the first attention (*head*), the
parts between two attentions (*layers*) and the part from the last attention but one on (*tail*) hand over the same
values: the hidden states and the result of attention. So a model of head, a few layers and tail is a valid graph, which
runs exactly as the layers run in the whole: with the same fused calls, threads and temporary memory. Layers of equal
ops, kernels, shapes and options are a *class*. The last layer belongs to the tail, since it may compute fewer rows.

A graph whose parts hand over different values, or values that are read two layers later, is not cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import BATCH_INPUTS, Graph
from optkit.graph.ops.attention import ATTENTION
from optkit.graph.shapes import signature


@dataclass(frozen=True)
class Parts:
    """The parts of ``graph``: head, layers, tail; ``values`` are the results of ``infer_shapes``."""

    graph: Graph
    values: Mapping[fx.Node, Any]

    @cached_property
    def parts(self) -> list[list[fx.Node]]:
        """The calls of head, layers and tail, in order."""
        found: list[list[fx.Node]] = [[]]
        attentions = list(self.graph.calls(*ATTENTION))
        for node in self.graph.fx.nodes:
            if node.op == "call_function":
                found[-1].append(node)
                if node in attentions[:-1]:
                    found.append([])
        return found

    @cached_property
    def part_of(self) -> dict[fx.Node, int]:
        """The index of the part of each call."""
        return {node: index for index, part in enumerate(self.parts) for node in part}

    @property
    def layers(self) -> range:
        """The indices of the layers."""
        return range(1, len(self.parts) - 1)

    @cached_property
    def everywhere(self) -> set[fx.Node]:
        """Results of the head that later parts than the next read: rotary angles."""
        return {node for node in self.parts[0] if self.last_reader(node) > 1}

    def last_reader(self, node: fx.Node) -> int:
        """The index of the last part that reads ``node``; the tail's for an output."""
        return max((self.part_of.get(user, len(self.parts) - 1) for user in node.users), default=0)

    @cached_property
    def handed_over(self) -> list[list[fx.Node]]:
        """For each part but the tail, the results that the next part reads, in order."""
        return [
            [n for n in part if self.last_reader(n) > index and n not in self.everywhere]
            for index, part in enumerate(self.parts[:-1])
        ]

    @cached_property
    def can_be_cut(self) -> bool:
        """True where any layer may follow the head or any other layer."""
        late = any(
            self.last_reader(node) > index + 1
            for index, nodes in enumerate(self.handed_over)
            for node in nodes
        )
        alike = {tuple(signature(self.values[n]) for n in nodes) for nodes in self.handed_over}
        return len(self.layers) > 0 and not late and len(alike) == 1

    @cached_property
    def classes(self) -> dict[str, list[int]]:
        """The indices of the layers of each class, by digest."""
        found: dict[str, list[int]] = {}
        for index in self.layers:
            found.setdefault(self.digest([index]), []).append(index)
        return found

    def digest(self, indices: Sequence[int]) -> str:
        """A digest of ops, kernels, options, wiring, shapes and dtypes of the parts of ``indices``."""
        lines = [line for index in indices for line in self.lines(index)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def lines(self, index: int) -> list[str]:
        """A line for each call of part ``index``, without names."""
        inside = {node: number for number, node in enumerate(self.parts[index])}
        before = self.handed_over[index - 1] if index else []

        def read(node: fx.Node) -> str:
            if node in inside:
                return f"%{inside[node]}"
            if node in before:
                return f"<{before.index(node)} {signature(self.values[node])}"
            name = re.sub(r"\d+", "", str(node.target)) if node.op == "placeholder" else node.op
            return f"{name} {signature(self.values[node])}"

        def line(node: fx.Node) -> str:
            given = fx.map_arg((node.args, node.kwargs), read)
            options = self.graph.site_options(node).get("kv_dtype")
            return f"{ops.op_name(node.target)} {node.meta.get('kernel')} {options} {given}"

        return [line(node) for node in self.parts[index]]

    def short(self, layers: Sequence[int]) -> Graph:
        """The graph of head, ``layers`` (ascending indices) and tail; weights are shared."""
        return Shortened(self, layers).graph()


class Shortened:
    """Builds the graph of some parts of another."""

    def __init__(self, parts: Parts, layers: Sequence[int]) -> None:
        self.parts, self.order = parts, [0, *layers, len(parts.parts) - 1]
        self.fx = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def graph(self) -> Graph:
        source = self.parts.graph
        kept = [node for index in self.order for node in self.parts.parts[index]]
        read = {argument for node in kept for argument in node.all_input_nodes}
        for node in source.fx.find_nodes(op="placeholder"):
            if node in read or str(node.target) in BATCH_INPUTS:
                self.copy(node)
        for before, index in zip([None, *self.order], self.order, strict=False):
            if before is not None:
                self.connect(before, index)
            for node in self.parts.parts[index]:
                self.copy(node)
        self.fx.output(fx.map_arg(source.fx.output_node().args[0], self.operand))
        weights = {str(n.target): source.weights[str(n.target)] for n in self.fx.find_nodes(op="get_attr")}
        pools = {str(n.target) for n in self.fx.find_nodes(op="placeholder")}
        states = tuple(spec for spec in source.meta.states if pools & set(spec.inputs))
        return Graph(self.fx, weights, replace(source.meta, states=states))

    def connect(self, before: int, index: int) -> None:
        """Let part ``index`` read the results of part ``before`` instead of those of its own predecessor."""
        handed_over = self.parts.handed_over
        for own, other in zip(handed_over[index - 1], handed_over[before], strict=True):
            self.copies[own] = self.copies[other]

    def operand(self, node: fx.Node) -> fx.Node:
        return self.copies[node] if node in self.copies else self.copy(node)

    def copy(self, node: fx.Node) -> fx.Node:
        made = self.fx.node_copy(node, self.operand)
        made.meta = dict(node.meta)
        self.copies[node] = made
        return made


def with_values(graph: Graph) -> Graph:
    """A clone of ``graph`` with small numbers in place of weights on the meta device: no checkpoint is needed."""
    clone = graph.clone()
    for weight in clone.weights.values():
        if weight.is_meta:
            number = 0.01 if weight.dtype.is_floating_point else 1
            weight.value = torch.full(weight.shape, number, dtype=weight.dtype, device="cpu")
    return clone

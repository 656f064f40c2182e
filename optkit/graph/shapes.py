"""Shapes of all values of a graph, from a run on the meta device at a given batch.

The shape rule of a dialect op is in its record; an aten op runs on meta tensors. Sizes depend on the batch, so the
batch is an argument: a ``Point``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from optkit.errors import first_line
from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.graph.operand_check import check_call
from optkit.graph.ops.aten import is_creator
from optkit.graph.ops.operands import expect
from optkit.graph.states import PROMPT_LENS, STATE_SLOTS, has_bounds, named_pools

SPLIT, MAX_PARTS = ops.aten("split.Tensor"), 4096
MAX_ELEMENTS = 1 << 40


@dataclass(frozen=True)
class Point:
    """The batch of a step: ``tokens`` new tokens in all, over ``sequences`` of ``context`` tokens after the step.

    A prefill of n tokens is ``Point(n, 1, n)``; a decode of a batch of b is ``Point(b, b, context)``.
    """

    tokens: int
    sequences: int = 1
    context: int = 1

    @property
    def is_decode(self) -> bool:
        """True for a token of each sequence after earlier tokens; the only token of a prompt is a prefill."""
        return self.tokens == self.sequences and self.context > 1

    @property
    def label(self) -> str:
        return f"decode@{self.context}" if self.is_decode else f"prefill {self.tokens}"


def infer_shapes(
    graph: Graph, point: Point, block_size: int = 16, *, half: bool = True
) -> dict[fx.Node, Any]:
    """Meta tensors for every node's value at ``point``; without ``half`` activations must be float32.

    Raises:
        ShapeError: the inputs of a node don't fit the op; the message names the node.
    """
    return MetaRun(graph, point, block_size, half=half).values


class ShapeError(Exception):
    """A node whose inputs don't fit."""


class MetaRun:
    """A run of the graph on meta tensors, node by node.

    Layers are alike, and an op on known shapes has a known result, so a model of thirty layers costs little more than
    a model of one.
    """

    def __init__(self, graph: Graph, point: Point, block_size: int, *, half: bool = True) -> None:
        self.graph, self.half = graph, half
        self.inputs = meta_inputs(graph, point, block_size)
        self.values: dict[fx.Node, Any] = {}
        self.known: dict[Any, Any] = {}
        with torch.device("meta"):
            for node in graph.fx.nodes:
                if node.op != "output":
                    self.values[node] = self.value(node)

    def value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs[str(node.target)]
        if node.op == "get_attr":
            return self.graph.weights[str(node.target)].on_meta()
        args = fx.map_arg(node.args, self.values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self.values.__getitem__)
        key = (node.target, signature(args), signature(kwargs))
        if key not in self.known:
            self.known[key] = self.call(node, args, kwargs)
        return self.known[key]

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return self.checked(node, args, kwargs)
        except Exception as error:  # on made-up arguments torch's own ops raise any type
            shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
            raise ShapeError(f"{node.name}: {first_line(error)} (arguments {shapes!s:.200})") from error

    def checked(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        op = ops.record_of(node.target)
        if op is not None:
            check_call(op.name, args, kwargs, half=self.half)
        elif node.target is SPLIT:
            check_split(*args[:2], *args[2:3] or (kwargs.get("dim", 0),))
        placed = {"device": "meta"} if is_creator(node.target) else {}
        result = ops.shape_rule(node.target)(*args, **kwargs | placed)
        check_size(result)
        return result


def check_split(x: Tensor, size: int, dim: int) -> None:
    """Refuse to make more than ``MAX_PARTS`` views.

    Raises:
        ValueError: too many parts.
    """
    expect(type(size) is int and x.shape[dim] <= size * MAX_PARTS, f"more than {MAX_PARTS} parts")


def check_size(value: Any) -> None:
    """Refuse tensors beyond any real model: products of their sizes would overflow.

    Raises:
        ValueError: a tensor has more than ``MAX_ELEMENTS`` elements.
    """
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(tensor, Tensor):
            expect(math.prod(tensor.shape) <= MAX_ELEMENTS, f"a result of {list(tensor.shape)} elements")


def signature(value: Any) -> Any:
    """Shapes, types and plain values of ``value``, hashable: the shape of an op's result depends on nothing else."""
    match value:
        case Tensor():
            return (tuple(value.shape), value.stride(), value.dtype)
        case dict():
            return tuple((name, signature(item)) for name, item in value.items())
        case list() | tuple():
            return (type(value), *(signature(item) for item in value))
        case _:
            return (type(value), value)


def meta_inputs(graph: Graph, point: Point, block_size: int) -> dict[str, Tensor]:
    """The batch inputs of docs/architecture.md as meta tensors."""
    blocks = -(-point.context // block_size)
    long: dict[str, Any] = {"dtype": torch.int64, "device": "meta"}
    int32: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
    inputs = {
        "input_ids": torch.empty(point.tokens, **long),
        "positions": torch.empty(point.tokens, **long),
        "slot_mapping": torch.empty(point.tokens, **long),
        "query_start": torch.empty(point.sequences + 1, **int32),
        "seq_lens": torch.empty(point.sequences, **int32),
        "block_tables": torch.empty(point.sequences, blocks, **int32),
        "logits_index": torch.empty(point.sequences, **long),
    }
    if graph.meta.recurrent_specs:
        inputs[STATE_SLOTS] = torch.empty(point.sequences, **int32)
    states = graph.meta.states
    if has_bounds(states):
        inputs[PROMPT_LENS] = torch.empty(point.sequences, **int32)
    inputs |= {name: inputs[base] for name, base in kv_layout(states).further_inputs.items()}
    return inputs | named_pools(states, blocks * point.sequences, block_size, point.sequences + 1, "meta")

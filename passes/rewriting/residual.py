"""The residual stream of a model: the values [T, hidden] that every layer reads through a norm and adds to.

A rotation or a permutation of the stream's channels is the same change everywhere: on the input side of the readers, on
the output side of the writers. ``residual_stream`` finds readers and writers by structure, in graphs before and after
fusion; no architecture is named. A model with any other op on the stream is refused with the reason.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference

aten = torch.ops.aten
NORMS = ops.norm_ops()
SCALES = (aten.mul.Tensor, aten.div.Tensor)  # by a number or a constant of one element


@dataclass
class ResidualStream:
    """The parts of a residual stream, each in execution order.

    Attributes:
        values: the stream: embeddings, and each sum.
        writers: ops added to the stream: embeddings, and linears (output and down projections).
        norms: ``rms_norm``, ``layer_norm`` and ``add_rms_norm`` ops on the stream.
        readers: linears on a norm's output, the output head included.
    """

    values: list[fx.Node] = field(default_factory=list)
    writers: list[fx.Node] = field(default_factory=list)
    norms: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)


class Unsupported(Exception):
    """The residual stream of the graph can't be delimited; the message has the reason."""


def residual_stream(graph: Graph) -> ResidualStream | str:
    """The residual stream of ``graph``, or the reason against delimiting the stream."""
    try:
        return Finder(graph).find()
    except Unsupported as error:
        return str(error)


class Finder:
    """Follows the stream from the embedding to the output head."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.stream = graph, ResidualStream()
        self.normed: set[fx.Node] = set()

    def find(self) -> ResidualStream:
        """The stream of the graph.

        Raises:
            Unsupported: an op other than norms, sums and linears reads the stream or a norm, or writes to the stream.
        """
        for node in self.graph.fx.nodes:
            if node.op == "call_function":
                self.visit(node)
        if not self.stream.norms:
            raise Unsupported("no norm reads the embedding")
        return self.stream

    def visit(self, node: fx.Node) -> None:
        """Sort ``node`` into the stream; nodes without an input from the stream are left out."""
        read = [source for source in node.all_input_nodes if source in self.stream.values]
        if self.is_token_embedding(node):
            self.stream.writers.append(node)
            self.stream.values.append(node)
        elif node.target is operator.getitem and node.args[0].target is reference.add_rms_norm:
            self.unpack(node)
        elif read:
            self.read_stream(node, read)
        elif any(source in self.normed for source in node.all_input_nodes):
            self.read_norm(node)

    def is_token_embedding(self, node: fx.Node) -> bool:
        return (
            node.target is reference.embedding
            and str(ops.weight(node).target) == self.graph.meta.input_embedding
        )

    def read_stream(self, node: fx.Node, read: list[fx.Node]) -> None:
        """Sort ``node``, a reader of the stream: a sum, a norm, a selection of rows or a scale."""
        if node.target in NORMS:
            self.stream.norms.append(node)
            if node.target is reference.add_rms_norm:
                self.write([source for source in node.args[:2] if source not in read])
            else:
                self.normed.add(node)
        elif node.target is aten.add.Tensor:
            self.write([source for source in node.args[:2] if source not in read])
            self.stream.values.append(node)
        elif node.target is reference.select_rows or self.is_scale(node):
            self.stream.values.append(node)
        else:
            raise Unsupported(f"{node.name} reads the residual stream without a norm")

    def unpack(self, node: fx.Node) -> None:
        """``node`` is the first or second result of an ``add_rms_norm``: the norm, or the sum."""
        if node.args[0] not in self.stream.norms:
            return
        if node.args[1] == 0:
            self.normed.add(node)
        else:
            self.stream.values.append(node)

    def is_scale(self, node: fx.Node) -> bool:
        """True where ``node`` multiplies the first argument by a number."""
        if node.target not in SCALES:
            return False
        weight = self.graph.weight_of(node.args[1])
        return isinstance(node.args[1], int | float) or (weight is not None and weight.shape.numel() == 1)

    def write(self, sources: list[fx.Node]) -> None:
        """Find the producer of each of ``sources``, values added to the stream."""
        for source in sources:
            while source.target is reference.select_rows or self.is_scale(source):
                source = source.args[0]
            if source.target not in (reference.linear, reference.embedding):
                raise Unsupported(f"{source.name}, which is no linear layer, is added to the residual stream")
            self.stream.writers.append(source)

    def read_norm(self, node: fx.Node) -> None:
        """Sort ``node``, a reader of a norm's output: a linear or a selection of rows."""
        if node.target is reference.select_rows:
            self.normed.add(node)
        elif node.target is reference.linear and ops.activation(node) in self.normed:
            self.stream.readers.append(node)
        else:
            raise Unsupported(f"{node.name}, which is no linear layer, reads a norm of the residual stream")

"""The residual stream by structure; checked by a rotation of its channels, which must leave the logits as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes.rewriting.folding import norm_of, norm_offset
from optkit.passes.rewriting.residual import ResidualStream, residual_stream
from tests.support.graphs import apply, assert_same_logits, captured

FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows")


def rotation(size: int) -> Tensor:
    """A random orthogonal matrix."""
    generator = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q.float()


def rotate(graph: Graph, stream: ResidualStream) -> None:
    """Fold each norm's weight into its readers, then rotate the stream; the head gets a weight of its own."""
    q = rotation(graph.weights[graph.meta.input_embedding].value.shape[1])
    for reader in stream.readers:
        norm = norm_before(reader)
        factor = graph.weight_value(ops.weight(norm_of(norm))) + norm_offset(norm)
        set_reader(graph, reader, (graph.linear_weight(reader) * factor) @ q)
    for norm in stream.norms:
        graph.set_weight(ops.weight(norm), torch.ones_like(graph.weight_value(ops.weight(norm))))
    for writer in stream.writers:
        embedding = writer.target is reference.embedding
        weight, bias = ops.weight(writer), ops.bias(writer)
        value = graph.weight_value(weight)
        graph.set_weight(weight, value @ q if embedding else q.T @ value)
        if bias is not None:
            graph.set_weight(bias, graph.weight_value(bias) @ q)


def norm_before(reader: fx.Node) -> fx.Node:
    node = reader.args[0]
    while node.target is reference.select_rows:
        node = node.args[0]
    return node


def set_reader(graph: Graph, reader: fx.Node, value: Tensor) -> None:
    if str(ops.weight(reader).target) != graph.meta.input_embedding:
        graph.set_weight(ops.weight(reader), value)
        return
    name = f"{graph.meta.output_embedding}.weight"
    graph.weights[name] = type(graph.weights[graph.meta.input_embedding])(value, None)
    reader.args = (reader.args[0], graph.weight_node(name, reader), *reader.args[2:])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("model", "options"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("granite", {})],
)
def test_rotation_of_readers_and_writers_keeps_the_logits(
    model: str, options: dict[str, bool], fused: bool
) -> None:
    graph = captured(model, **options)
    before = graph.clone()
    for name in FUSIONS if fused else ():
        apply(graph, name)
    stream = residual_stream(graph)
    assert isinstance(stream, ResidualStream), stream
    assert len(stream.norms) == 5 and len(stream.writers) == 1 + 2 * 2
    assert len(stream.readers) == (2 * 2 if fused else 2 * 5) + 1
    rotate(graph, stream)
    verify(graph)
    assert_same_logits(before, graph)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gemma2", "is added to the residual stream"),  # a norm after each block
        ("mixtral", "reads a norm of the residual stream"),  # experts
    ],
)
def test_residual_stream_names_the_op_when_something_else_touches_it(model: str, reason: str) -> None:
    found = residual_stream(captured(model))
    assert isinstance(found, str) and reason in found


def test_residual_stream_has_both_embeddings_as_writers_when_positions_are_learned() -> None:
    graph = captured("gpt2")
    stream = residual_stream(graph)
    assert isinstance(stream, ResidualStream)
    assert [w.target is reference.embedding for w in stream.writers] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert {norm.target for norm in stream.norms} == {reference.layer_norm}

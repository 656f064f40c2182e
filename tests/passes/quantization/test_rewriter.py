"""Linears replaced by quantized ones: the values of the codes, for all steps or for steps of few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.checkpoint.insertion import float_origins
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes.base import Site
from optkit.passes.quantization.formats import Int8Format
from optkit.passes.quantization.rewriter import QuantizedLinearRewriter, variant_name
from tests.support.graphs import captured, dense, random_ids

NAME = "model.layers.0.mlp.down_proj"
INT8 = Int8Format(weight_only=True)
FEW, MANY = random_ids((4, 9))


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [N, K] and scales [N, 1] of ``weight``, a 127th of a row's largest."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def rewritten(limit: int | None) -> tuple[Graph, Graph]:
    """A graph with an int8 layer, and a float graph with the values of the codes."""
    graph, floats = captured("llama"), captured("llama")
    node = next(n for n in graph.linears() if n.args[1].target == f"{NAME}.weight")
    codes, scale = codes_of(graph.linear_weight(node))
    name = NAME if limit is None else variant_name(NAME, limit)
    rewriter = QuantizedLinearRewriter(graph, limit)
    op = rewriter.replace(Site(name, (node,)), INT8, {"weight": codes, "weight_scale": scale})
    assert op.target is reference.linear_w8a16
    rewriter.finish()
    verify(graph)
    floats.weights[f"{NAME}.weight"].value = codes * scale
    return graph, floats


def test_quantized_layer_serves_all_steps_without_a_limit() -> None:
    graph, floats = rewritten(None)
    for ids in (FEW, MANY):
        torch.testing.assert_close(dense(graph, ids), dense(floats, ids))
    assert [origin.site for origin in float_origins(graph).values()] == [NAME]
    assert graph.weights[f"{NAME}.weight"].value.dtype == torch.int8


def test_quantized_layer_serves_steps_up_to_the_limit_and_the_float_layer_the_others() -> None:
    graph, floats = rewritten(4)
    source = captured("llama")
    torch.testing.assert_close(dense(graph, FEW), dense(floats, FEW))
    torch.testing.assert_close(dense(graph, MANY), dense(source, MANY))
    assert not torch.allclose(dense(floats, MANY), dense(source, MANY), atol=1e-4)
    assert torch.equal(graph.weights[f"{NAME}.weight"].value, source.weights[f"{NAME}.weight"].value)
    (choice,) = graph.calls(reference.by_tokens)
    assert choice.args[3] == 4


def test_float_layer_that_is_kept_is_that_of_the_source() -> None:
    graph, _ = rewritten(None)
    (origin,) = float_origins(graph).values()
    origin.restore(graph)
    assert torch.equal(
        graph.weights[f"{NAME}.weight"].value, captured("llama").weights[f"{NAME}.weight"].value
    )

"""Quantized linears in the place of float ones, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.checkpoint.insertion import fall_back, float_origins, insert, quantized_sites
from optkit.checkpoint.quantized_linear import SCALE, QuantizedLinear
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from tests.support.graphs import apply, assert_origins_invert, captured, dense, random_ids

(IDS,) = random_ids([23])


def int8(graph: Graph, node: Any, name: str) -> QuantizedLinear:
    """The layer of ``node`` in int8, by a scale of 1 / 64 for all rows."""
    weight = graph.linear_weight(node)
    codes = (weight * 64).round().clamp(-127, 127).to(torch.int8)
    operands = {"weight": codes, SCALE: torch.full((len(codes), 1), 1 / 64)}
    return QuantizedLinear(
        name, (len(codes), weight.shape[1]), reference.linear_w8a8, operands, activation_group=0
    )


def test_insert_shares_the_quantized_activation_of_all_readers() -> None:
    graph = captured("llama")
    for node in graph.linears():
        name = str(node.args[1].target).removesuffix(".weight")
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            insert(graph, node, int8(graph, node, name))
    graph.prune()
    verify(graph)
    assert_origins_invert(graph)
    assert len(list(graph.calls(reference.linear_w8a8))) == 2 * 3
    assert len(list(graph.calls(reference.quantize_per_token))) == 2


def test_insert_leaves_a_tied_embedding_as_it_is() -> None:
    graph = captured("llama", tie_word_embeddings=True)
    embedding = graph.weights[graph.meta.input_embedding].value
    head = list(graph.linears())[-1]
    insert(graph, head, int8(graph, head, graph.meta.output_embedding))
    graph.prune()
    verify(graph)
    assert graph.weights[graph.meta.input_embedding].value is embedding
    assert graph.weights["lm_head.weight"].value.dtype == torch.int8


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_fall_back_restores_chosen_layers_and_no_others(model: str) -> None:
    graph = captured(model)
    apply(graph, "fuse_qkv")
    expected = dense(graph, IDS)
    apply(graph, "int8")
    sites = list(quantized_sites(graph))
    few = fall_back(graph, sites[:3])
    verify(few)
    assert list(quantized_sites(few)) == sites[3:] and list(quantized_sites(graph)) == sites
    whole = fall_back(few, sites)
    assert float_origins(whole) == {} and torch.equal(dense(whole, IDS), expected)

"""Columns of the scoring graph, against the attention weights of transformers; models that are refused."""

from __future__ import annotations

import pytest
import torch

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.runtime.specprefill.graph import default_layers, num_attention_layers, scoring_graph
from optkit.runtime.specprefill.selection import QUERIES, attention_to
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids
from tests.support.target import TARGET
from tests.support.tiny_runtime import int8_graph

FOUR = {"num_hidden_layers": 4}


def columns(graph: Graph, num_layers: int, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys of each scored layer."""
    scoring, layers = scoring_graph(graph, num_layers)
    model = lower(scoring, TARGET)
    rows = model(dense_inputs([len(ids)], ids, scoring.meta.states))
    parts = iter(rows.split([size for layer in layers for size in layer.sizes], dim=1))
    return [
        (next(parts).unflatten(1, (layer.heads, -1)), next(parts).unflatten(1, (layer.kv_heads, -1)))
        for layer in layers
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "deepseek_v3"])
def test_scored_attention_is_that_of_transformers(name: str) -> None:
    overrides = FOUR if name == "llama" else {}
    graph, (ids,) = captured(name, **overrides), random_ids([QUERIES + 30])
    count = 3 if name == "llama" else 2
    model = tiny_model(name, **overrides).eval()
    with torch.no_grad():
        weights = model(ids[None], output_attentions=True, use_cache=False).attentions
    _, layers = scoring_graph(graph, count)
    for number, (queries, keys) in enumerate(columns(graph, count, ids)):
        found = attention_to(queries[-QUERIES:], keys, layers[number].scores)
        expected = weights[number][0, :, -QUERIES:].amax((0, 1))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_an_int8_model_scores_nearly_as_its_float_model() -> None:
    (ids,) = random_ids([QUERIES + 30])
    for (q, k), (fq, fk) in zip(
        columns(int8_graph(), 2, ids), columns(captured("llama"), 2, ids), strict=True
    ):
        for found, expected in ((q, fq), (k, fk)):
            assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


def test_later_layers_and_their_pools_are_gone() -> None:
    graph = captured("llama", **FOUR)
    scoring, _ = scoring_graph(graph, 3)
    assert [spec.layer for spec in scoring.meta.kv_specs] == [0, 1]
    inputs = {str(node.target) for node in scoring.fx.nodes if node.op == "placeholder"}
    assert {"k_cache_0", "k_cache_1"} <= inputs and not {"k_cache_2", "k_cache_3"} & inputs
    assert not any(".3." in name for name in scoring.weights)
    assert len(graph.meta.kv_specs) == num_attention_layers(graph) == 4


def test_the_scoring_graph_takes_the_packed_weights_of_the_model() -> None:
    graph, shared = int8_graph().clone(), SharedWeights()
    shared.names |= graph.weights.keys()
    first = lower(graph.clone(), TARGET, shared=shared)
    second = lower(scoring_graph(graph, 2)[0], TARGET, shared=shared)
    addresses = [
        {t.data_ptr() for v in model.variants for t in v.tensors() if t.numel() > 256}
        for model in (first, second)
    ]
    assert addresses[1] and addresses[1] <= addresses[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma2", "windows"), ("llama4_text", "windows"), ("bloom", "ALiBi"), ("lfm2", "recurrent state")],
)
def test_models_that_count_slots_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        scoring_graph(captured(name), 2)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_numbers_of_layers_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"{count} layers can't score prompts"):
        scoring_graph(captured("llama"), count)


def test_default_layers_are_a_quarter() -> None:
    assert [default_layers(count) for count in (2, 4, 30, 32)] == [2, 2, 8, 8]

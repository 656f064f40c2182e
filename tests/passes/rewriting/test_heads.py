"""Heads of attention layers against the sizes in transformers' config, and near misses with a reason."""

from __future__ import annotations

import pytest
from torch import fx

from optkit.graph import ops
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.passes.base import Site
from optkit.passes.rewriting.heads import Heads, heads_at, heads_of
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured


def attentions(graph: Graph) -> list[fx.Node]:
    return list(graph.calls(reference.attention))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("passes", [(), ("fuse_qkv",), ("fuse_qkv", "select_logits_rows")])
def test_heads_of_gives_the_sizes_of_the_config(name: str, passes: tuple[str, ...]) -> None:
    config, graph = tiny_model(name).config, captured(name)
    for row in passes:
        apply(graph, row)
    size = config.head_dim
    for layer, attention in enumerate(attentions(graph)):
        found = heads_of(graph, attention)
        assert isinstance(found, Heads)
        assert found.shape == (config.num_attention_heads, config.num_key_value_heads, size, size)
        assert str(ops.weight(found.out).target) == f"model.layers.{layer}.self_attn.o_proj.weight"
        assert len(found.projections) == (1 if passes else 3)
        assert heads_at(graph, Site("layer", (found.out,))).joined is found.joined


def test_heads_of_refuses_a_result_with_a_second_reader() -> None:
    graph = captured("llama")
    attention = attentions(graph)[0]
    with graph.fx.inserting_after(attention):
        graph.fx.call_function(reference.silu_mul, (attention, attention))
    assert heads_of(graph, attention) == "something besides an output projection reads its result"


def test_heads_of_refuses_quantized_projections() -> None:
    graph = captured("llama")
    apply(graph, "int8", ignore=["re:.*o_proj"])
    assert heads_of(graph, attentions(graph)[0]) == "q, k and v are not three projections, or one for all"

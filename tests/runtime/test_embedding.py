"""Hidden states in front of the output head, against those of transformers; one copy of the weights; batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.runtime.embedding import Embedder, head_of, hidden_graph
from optkit.runtime.pooling import POOLINGS, Pooling
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids
from tests.support.target import TARGET

PROMPTS = [ids.tolist() for ids in random_ids([5, 1, 17, 40, 8])]


def hidden(name: str, prompts: list[list[int]], pooling: str) -> Tensor:
    """The pooled last hidden states of transformers."""
    model, found = tiny_model(name).eval(), []
    for prompt in prompts:
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states[
                -1
            ][0]
        found.append({"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling])
    return torch.stack(found).float()


def embedder(graph: Graph, max_tokens: int = 64) -> Embedder:
    return Embedder(lower(hidden_graph(graph), TARGET), 8, max_tokens)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3", "lfm2"])
def test_vectors_are_the_hidden_states_of_transformers(name: str, pooling: Pooling) -> None:
    found = embedder(captured(name)).embed(PROMPTS, pooling)
    torch.testing.assert_close(found, hidden(name, PROMPTS, pooling), atol=2e-4, rtol=2e-4)


def quantized() -> Graph:
    """A llama in the formats of ``ttft-cpu``."""
    graph = captured("llama")
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows"):
        apply(graph, name)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    apply(graph, "flash_attention")
    apply(graph, "kv_int8")
    return graph


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_of_a_quantized_model_point_the_same_way(pooling: Pooling) -> None:
    found = embedder(quantized()).embed(PROMPTS, pooling)
    expected = hidden("llama", PROMPTS, pooling)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999


@pytest.mark.parametrize("max_tokens", [1, 7, 1000])
def test_a_vector_depends_on_its_text_alone(max_tokens: int) -> None:
    """To the bit, by native kernels: alone, in a batch, in pieces, and on a pool that was used before."""
    whole = embedder(quantized())
    for pooling in POOLINGS:
        alone = torch.cat([whole.embed([prompt], pooling) for prompt in PROMPTS])  # type: ignore[arg-type]
        pieces = embedder(quantized(), max_tokens).embed(PROMPTS, pooling)  # type: ignore[arg-type]
        assert torch.equal(alone, pieces)


def test_the_second_lowering_takes_the_packed_weights_of_the_first() -> None:
    graph, shared = quantized(), SharedWeights()
    shared.names |= graph.weights.keys()
    first = lower(graph, TARGET, shared=shared)
    second = lower(hidden_graph(graph), TARGET, shared=shared)
    addresses = [
        {t.data_ptr() for v in model.variants for t in v.tensors() if t.numel() > 256}
        for model in (first, second)
    ]
    assert addresses[1] and addresses[1] <= addresses[0]


def test_the_head_is_found_behind_ops_on_logits_and_variants() -> None:
    gemma = captured("gemma2")
    logits = next(node for node in gemma.fx.nodes if node.op == "output").args[0]
    assert logits.target is not reference.linear and head_of(logits).target is reference.linear
    graph = captured("llama")
    apply(graph, "int8", max_tokens=4, lm_head=True)
    logits = next(node for node in graph.fx.nodes if node.op == "output").args[0]
    assert logits.target is reference.by_tokens and head_of(logits).target is reference.linear


def test_a_graph_without_a_head_is_refused() -> None:
    graph = captured("llama")
    output = next(node for node in graph.fx.nodes if node.op == "output")
    norm = next(node for node in reversed(list(graph.fx.nodes)) if node.target is reference.rms_norm)
    output.args = (norm,)
    with pytest.raises(UserError, match="the output head can't be found"):
        hidden_graph(graph)

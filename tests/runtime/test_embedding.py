"""Vectors against hidden states of transformers; one copy of the weights; the queue of messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optkit.cancellation import check_cancelled
from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.lowering.lower import lower
from optkit.runtime import embedding
from optkit.runtime.embedding import EMBEDDING_FAILED, Embedder, Embedding
from optkit.runtime.hidden_graph import hidden_graph
from optkit.runtime.pooling import POOLINGS, Pooling
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import Batch
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
    found, expected = embedder(captured(name)).embed(PROMPTS, pooling), hidden(name, PROMPTS, pooling)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-4, rtol=2e-4)
    assert torch.nn.functional.cosine_similarity(torch.from_numpy(found), expected).min() > 0.9999


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
    assert torch.nn.functional.cosine_similarity(torch.from_numpy(found), expected).min() > 0.999


@pytest.mark.parametrize("max_tokens", [1, 7, 1000])
def test_a_vector_depends_on_its_text_alone(max_tokens: int) -> None:
    """To the bit, by native kernels: alone, in a batch, in pieces, and on a pool that was used before."""
    whole = embedder(quantized())
    for pooling in POOLINGS:
        alone = np.concatenate([whole.embed([prompt], pooling) for prompt in PROMPTS])  # type: ignore[arg-type]
        pieces = embedder(quantized(), max_tokens).embed(PROMPTS, pooling)  # type: ignore[arg-type]
        assert np.array_equal(alone, pieces)


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


def steps(embedder: Embedder, limits: list[int]) -> list[Embedding]:
    """The finished messages in order, of steps with ``limits`` in turn."""
    done, turn = [], 0
    while embedder.has_work:
        done += embedder.step(limits[turn % len(limits)])
        turn += 1
    return done


def test_messages_share_steps_and_get_the_vectors_of_each_alone() -> None:
    """Whatever the limit of a step, which changes from step to step as in an engine with requests."""
    graph = quantized()
    alone = {pooling: embedder(graph).embed(PROMPTS, pooling) for pooling in POOLINGS}
    for limits in ([64], [7], [64, 3, 20]):
        queue = embedder(graph)
        messages = [Embedding(pooling, PROMPTS, pooling) for pooling in POOLINGS]
        for message in messages:
            queue.add(message)
        assert steps(queue, limits) == messages
        for message in messages:
            assert np.array_equal(message.stacked(), alone[message.pooling])


def test_texts_of_several_messages_run_in_a_single_step() -> None:
    queue, sizes = watched(embedder(quantized()))
    for name in "abcd":
        queue.add(Embedding(name, [PROMPTS[0]], "last"))
    assert len(queue.step(64)) == 4 and sizes == [4]


def test_pool_of_a_text_longer_than_a_step_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MAX_TEXTS", 2)
    queue = embedder(quantized(), max_tokens=16)
    expected = queue.embed([PROMPTS[2]], "last")
    assert queue.runner is not None
    queue.add(Embedding("long", [PROMPTS[3]], "last"))  # 5 blocks of 8, of a step of 2
    sizes = []
    while queue.has_work:
        queue.step(16)
        sizes.append(queue.runner.num_blocks if queue.runner else 0)
    assert sizes == [5, 5, 0]
    queue.add(Embedding("left", [PROMPTS[3]], "last"))
    queue.step(16)
    assert queue.abort("left") and queue.runner is None
    assert np.array_equal(queue.embed([PROMPTS[2]], "last"), expected)


def test_a_step_has_at_most_its_tokens() -> None:
    queue, sizes = watched(embedder(quantized()), count=lambda batch: batch.num_tokens)
    queue.add(Embedding("a", PROMPTS, "last"))
    steps(queue, [16])
    assert max(sizes) <= 16 and sum(sizes) == sum(map(len, PROMPTS))


def watched(queue: Embedder, count: Any = lambda batch: len(batch.items)) -> tuple[Embedder, list[int]]:
    """``queue`` with a list of ``count`` of each batch."""
    queue.embed([[1] * 64], "last")  # makes the pool
    runner, sizes = queue.runner, list[int]()
    assert runner is not None
    execute = runner.execute

    def counted(batch: Batch) -> Tensor:
        sizes.append(count(batch))
        return execute(batch)

    runner.execute = counted  # type: ignore[method-assign]
    return queue, sizes


def test_an_aborted_message_leaves_the_queue_and_the_others_stay() -> None:
    queue = embedder(quantized())
    expected = queue.embed(PROMPTS, "last")
    gone, kept = Embedding("gone", PROMPTS, "last"), Embedding("kept", PROMPTS, "last")
    queue.add(gone)
    queue.add(kept)
    queue.step(16)
    assert queue.abort("gone") and not queue.abort("gone")
    assert steps(queue, [16]) == [kept] and np.array_equal(kept.stacked(), expected)


def test_a_step_whose_clients_have_left_is_cancelled() -> None:
    queue, sizes = watched(embedder(quantized()))
    runner = queue.runner
    assert runner is not None
    execute = runner.execute

    def checked(batch: Batch) -> Tensor:
        check_cancelled()
        return execute(batch)

    runner.execute = checked  # type: ignore[method-assign]
    queue.add(Embedding("a", [PROMPTS[0]], "last"))
    queue.add(Embedding("b", [PROMPTS[1]], "last"))
    assert queue.step(64, lambda: {"a", "b"}) == [] and sizes == []
    assert {message.request_id for message in queue.step(64, lambda: {"a"})} == {"a", "b"}


class Broken:
    """Makes ``execute`` of every runner raise, or give NaN, for a batch with ``token``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: int, nan: bool) -> None:
        execute = ModelRunner.execute

        def broken(runner: ModelRunner, batch: Batch) -> np.ndarray:
            if any(token in item.request.token_ids for item in batch.items):
                if not nan:
                    raise RuntimeError("injected")
                rows = execute(runner, batch)
                ends = [i for i, item in enumerate(batch.items) if token in item.request.token_ids]
                rows[ends] = float("nan")
                return rows
            return execute(runner, batch)

        monkeypatch.setattr(ModelRunner, "execute", broken)


@pytest.mark.parametrize("nan", [False, True])
def test_a_failure_of_the_model_ends_its_message_alone(monkeypatch: pytest.MonkeyPatch, nan: bool) -> None:
    texts = [[5, 6, 7], [8, 9], [11, 12]]
    queue = embedder(quantized())
    expected = queue.embed(texts, "last")
    Broken(monkeypatch, 63, nan)
    good, bad = Embedding("good", texts, "last"), Embedding("bad", [[5], [63, 3], [9]], "last")
    queue.add(bad)
    queue.add(good)
    assert set(steps(queue, [64])) == {good, bad}
    assert bad.error == EMBEDDING_FAILED and np.array_equal(good.stacked(), expected)

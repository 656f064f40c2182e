"""ModelRunner and the KV pools: the flattened token batch, and a small attention model through it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optkit.graph.states import KVSpec
from optkit.lowering.dense import dense_inputs
from optkit.runtime.engine import Engine
from optkit.runtime.runner import (
    ModelRunner,
    batch_inputs,
    chunk_inputs,
    decode_inputs,
    state_slots,
    with_sinks,
)
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest
from tests.support.recurrent_model import RecurrentModel

VOCAB = 32


def item(num_prompt: int, num_computed: int, num_new: int, table: list[int]) -> ScheduledRequest:
    ids = tuple(100 * num_prompt + i for i in range(num_prompt))
    request = EngineRequest(
        request_id=str(num_prompt), prompt_ids=ids, sampling=SamplingParams(max_tokens=1), arrival=0.0
    )
    return ScheduledRequest(Request(request, list(ids), num_computed, [table], [0]), num_new)


def test_the_flattened_token_batch() -> None:
    batch = Batch((item(6, 5, 1, [9, 2]), item(9, 3, 4, [7, 1, 4]), item(2, 0, 2, [0])))
    inputs = batch_inputs(batch, block_size=4)
    wanted = {
        "input_ids": [605, 903, 904, 905, 906, 200, 201],
        "positions": [5, 3, 4, 5, 6, 0, 1],
        "slot_mapping": [9, 31, 4, 5, 6, 0, 1],
        "query_start": [0, 1, 5, 7],
        "seq_lens": [6, 7, 2],
        "block_tables": [[9, 2], [7, 1], [0, 0]],
        "logits_index": [0, 6],
    }
    assert {name: array.tolist() for name, array in inputs.items()} == wanted
    int32 = {"query_start", "seq_lens", "block_tables"}
    assert {name for name, array in inputs.items() if array.dtype == np.int32} == int32
    assert {name for name, array in inputs.items() if array.dtype == np.int64} == set(wanted) - int32


@pytest.mark.parametrize("num_new", [1, 2])
def test_sinks_are_a_sequence_before_their_request(num_new: int) -> None:
    """The table begins with the block of the sinks; positions go on, and places are counted in the table."""
    whole = item(20, 20 - num_new, num_new, [9, 2, 5])
    whole.request.num_forgotten = 8
    batch = with_sinks(Batch((item(2, 0, 2, [0]), replace(whole, sinks=(2000, 2001)))))
    inputs = {name: array.tolist() for name, array in batch_inputs(batch, block_size=4).items()}
    assert inputs == {
        "input_ids": [200, 201, 2000, 2001] + [2018, 2019][-num_new:],
        "positions": [0, 1, 8, 9] + [18, 19][-num_new:],
        "slot_mapping": [0, 1, 36, 37] + [22, 23][-num_new:],
        "query_start": [0, 2, 4, 4 + num_new],
        "seq_lens": [2, 2, 12],
        "block_tables": [[0, 0, 0], [9, 0, 0], [9, 2, 5]],
        "logits_index": [1, 3 + num_new],
    }
    assert batch.num_tokens == 4 + num_new


def test_a_decode_of_a_request_that_has_forgotten_tokens_counts_places_in_its_table() -> None:
    whole = item(20, 19, 1, [9, 2, 5])
    whole.request.num_forgotten = 8
    inputs = decode_inputs(Batch((whole,)), 4)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        name: array.tolist() for name, array in chunk_inputs(Batch((whole,)), 4).items()
    }
    assert inputs["positions"].tolist() == [19] and inputs["seq_lens"].tolist() == [12]


@st.composite
def single_tokens(draw: st.DrawFn) -> Batch:
    """A batch with a token of each request: decodes, ends of prompts, and chunks with more to come."""
    items = []
    for index in range(draw(st.integers(1, 9))):
        computed = draw(st.integers(0, 20))
        left = draw(st.sampled_from([1, 1, 3]))
        table = draw(st.lists(st.integers(0, 50), min_size=6, max_size=6))
        ids = [1000 * index + i for i in range(computed + left)]
        received = EngineRequest(
            request_id=str(index), prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=1), arrival=0.0
        )
        scored = draw(st.booleans())
        items.append(ScheduledRequest(Request(received, ids, computed, [table], [0]), 1, all_logits=scored))
    return Batch(tuple(items))


@given(single_tokens(), st.sampled_from([4, 5, 16]))
def test_inputs_of_single_tokens_are_those_of_chunks_of_one(batch: Batch, block_size: int) -> None:
    found, wanted = decode_inputs(batch, block_size), chunk_inputs(batch, block_size)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in wanted.items()
    }
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in wanted.items()}


def test_inputs_of_decodes_by_hand() -> None:
    batch = Batch((item(6, 5, 1, [9, 2]), item(9, 3, 1, [7, 1, 4]), item(1, 0, 1, [3])))
    assert {name: array.tolist() for name, array in batch_inputs(batch, block_size=4).items()} == {
        "input_ids": [605, 903, 100],
        "positions": [5, 3, 0],
        "slot_mapping": [9, 31, 12],
        "query_start": [0, 1, 2, 3],
        "seq_lens": [6, 4, 1],
        "block_tables": [[9, 2], [7, 0], [3, 0]],
        "logits_index": [0, 2],
    }


class TinyAttention:
    """Two layers of single-head attention over the paged pools, written for clarity."""

    weight_bytes = 0

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def __init__(self) -> None:
        self.vocab_size = VOCAB
        self.states = self.kv_specs = [KVSpec(0, 1, 8, 8), KVSpec(1, 1, 8, 4)]
        g = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, 8, generator=g)
        self.head = torch.randn(12, VOCAB, generator=g)
        self.rows: list[int] = []

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        angle = inputs["positions"][:, None] * torch.arange(1, 9) / 8
        hidden = self.embedding[inputs["input_ids"]] + angle.sin()
        first = self.attend(0, hidden, hidden, inputs)
        second = self.attend(1, first, first[:, :4], inputs)
        self.rows.append(len(inputs["logits_index"]))
        return (torch.cat([first, second], 1) @ self.head)[inputs["logits_index"]]

    def attend(
        self, layer: int, x: torch.Tensor, v: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        k_cache, v_cache = inputs[f"k_cache_{layer}"], inputs[f"v_cache_{layer}"]
        k_cache.view(-1, k_cache.shape[-1])[inputs["slot_mapping"]] = x
        v_cache.view(-1, v_cache.shape[-1])[inputs["slot_mapping"]] = v
        out = torch.empty(len(x), v.shape[1])
        for s, length in enumerate(inputs["seq_lens"].tolist()):
            rows = slice(int(inputs["query_start"][s]), int(inputs["query_start"][s + 1]))
            table = inputs["block_tables"][s].long()
            k, values = k_cache[table].flatten(0, 2)[:length], v_cache[table].flatten(0, 2)[:length]
            scores = x[rows] @ k.T
            future = torch.arange(length) > inputs["positions"][rows, None]
            out[rows] = scores.masked_fill(future, float("-inf")).softmax(-1) @ values
        return out


def tiny_engine(num_blocks: int, **limits: int) -> Engine:
    config = SchedulerConfig(
        **{"max_num_seqs": 6, "max_num_batched_tokens": 7, "max_model_len": 64, "block_size": 4} | limits,
        num_blocks=num_blocks,
    )
    runner = ModelRunner(TinyAttention(), num_blocks, config.block_size)
    for pool in runner.kv_pools.values():
        pool.fill(np.nan)  # reading a slot nobody wrote shows
    return Engine(runner, config)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chunks_batches_and_preemption_do_not_change_the_outputs(temperature: float) -> None:
    prompts = [[(7 * i + j) % VOCAB for j in range(3 * i + 1)] for i in range(6)]
    sampling = [SamplingParams(max_tokens=12, temperature=temperature, seed=i) for i in range(6)]
    roomy = tiny_engine(16, max_num_batched_tokens=64, block_size=16)
    wanted = [roomy.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    engine = tiny_engine(11)
    assert engine.generate(prompts, sampling) == wanted
    assert engine.stats().num_preemptions > 0
    assert len({tuple(tokens) for tokens in wanted}) > 1


def test_a_chunk_without_logits_never_asks_the_model_for_zero_rows() -> None:
    engine = tiny_engine(16)
    engine.generate([list(range(20))], SamplingParams(max_tokens=2, temperature=0.0))
    assert engine.runner.model.rows == [1, 1, 1, 1]


# -- recurrent states --------------------------------------------------------------------------------------


def recurrent_engine(hybrid: bool, **limits: int) -> Engine:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96, "block_size": 4} | limits
    config = SchedulerConfig(**sizes, num_blocks=96, num_state_slots=4, num_checkpoints=3)
    return Engine(ModelRunner(RecurrentModel(hybrid), 96, 4, num_slots=7), config)


def alone(model: RecurrentModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens, each from the whole text in one call from zeros."""
    ids = list(prompt)
    for _ in range(max_tokens):
        inputs = dense_inputs([len(ids)], torch.tensor(ids), model.states, 4)
        ids.append(int(model(inputs)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "recurrent alone"])
def test_recurrent_models_answer_as_alone_when_prompts_are_chunked_mixed_and_cached(hybrid: bool) -> None:
    engine, model = recurrent_engine(hybrid), RecurrentModel(hybrid)
    stem = [(7 * i) % 31 for i in range(41)]
    prompts = [[*stem, i] for i in range(5)] + [[3], [4, 5, 6], stem[:9]]
    wanted = [alone(model, prompt, 10) for prompt in prompts]
    params = SamplingParams(max_tokens=10, temperature=0.0)
    for _ in range(3):
        assert engine.generate(prompts, params) == wanted
        engine.scheduler.check()
    assert engine.stats().prefix_cache_hits > 0


def test_runner_refuses_slots_when_they_are_shared_or_missing() -> None:
    def batch(*slots: int) -> Batch:
        params = SamplingParams(max_tokens=1)
        made = EngineRequest(request_id="", prompt_ids=(1,), sampling=params, arrival=0.0)
        requests = [Request(made, [1], state_slot=slot) for slot in slots]
        return Batch(tuple(ScheduledRequest(request, 1) for request in requests))

    assert state_slots(batch(2, 0), 3).tolist() == [2, 0]
    for wrong in ((-1,), (3,), (1, 1)):
        with pytest.raises(ValueError, match="state slots"):
            state_slots(batch(*wrong), 3)

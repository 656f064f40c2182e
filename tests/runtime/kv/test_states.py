"""Slots and checkpoints of recurrent states, in agreement with the prefix cache."""

from __future__ import annotations

import logging

import pytest

from optkit.runtime.engine import Engine
from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import Node, PrefixCache
from optkit.runtime.kv.states import StateSlots
from optkit.runtime.prefill import NO_ROOM, Prefill
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, StateCopy
from tests.support.fakes import fake_engine

BLOCK = 4


def recurrent_engine(**options: object) -> Engine:
    """An engine with a recurrent state and 4 checkpoints, on a fake runner."""
    defaults = {"num_state_slots": 8, "num_checkpoints": 4, "block_size": BLOCK, "max_num_seqs": 8}
    return fake_engine(defaults | {"max_num_batched_tokens": 16} | options)


def plain_engine() -> Engine:
    return fake_engine({"enable_prefix_caching": False})


def answer(engine: Engine, prompt: list[int], **sampling: object) -> list[int]:
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0} | sampling)
    (tokens,) = engine.generate([prompt], params)
    engine.scheduler.check()
    return tokens


def computed(engine: Engine, prompt: list[int], **sampling: object) -> int:
    """Prompt tokens that ``engine`` computes; the answer must be that of an engine without states or cache."""
    before = len(engine.runner.batches)
    assert answer(engine, prompt, **sampling) == answer(plain_engine(), prompt, **sampling)
    batches: list[Batch] = engine.runner.batches[before:]
    steps = len(answer(plain_engine(), prompt, **sampling)) - 1  # a decode step each but for the first token
    return sum(batch.num_tokens for batch in batches) - steps


def test_prompt_continues_at_the_checkpoint_when_it_begins_alike() -> None:
    engine = recurrent_engine()
    stem = list(range(1, 23))  # 22 tokens: the checkpoint is after 20
    assert computed(engine, stem) == 22
    assert computed(engine, stem) == 2
    assert computed(engine, [*stem, 60, 61]) == 4
    assert engine.stats().prefix_cache_lost == 0


def test_a_pinned_prompt_keeps_its_checkpoint_while_others_come_and_go() -> None:
    engine, stem = recurrent_engine(), tuple(range(1, 21))
    sampling = SamplingParams(max_tokens=1)
    for name, ids in (("a", stem), ("b", stem[:12]), ("c", stem[4:])):
        engine.add_request(
            EngineRequest(
                request_id=name, prompt_ids=ids, sampling=sampling, arrival=0.0, prefill=Prefill(pin=name)
            )
        )
    ends = []
    while engine.has_work:
        ends += engine.step()
    assert [(end.num_prefilled, end.error) for end in ends] == [(20, None), (12, None), (16, NO_ROOM)]
    for seed in range(30, 40):  # more than there are checkpoints
        answer(engine, [seed, *range(20, 29)], max_tokens=1)
    assert computed(engine, [*stem, 60, 61]) == 2
    assert computed(engine, [*stem[:12], 60, 61]) == 2
    engine.scheduler.check()


def test_next_turn_continues_in_the_answer_when_it_repeats_the_answer() -> None:
    engine = recurrent_engine()
    prompt = list(range(1, 10))
    said = answer(engine, prompt, max_tokens=12)  # 20 tokens with a state at the end
    assert computed(engine, [*prompt, *said, 7]) == 2
    assert engine.stats().checkpoints_used <= 4


def test_lost_tokens_are_counted_and_the_branch_is_kept_for_the_third_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine, stem = recurrent_engine(), list(range(1, 13))
    answer(engine, [*stem, *range(20, 32)])
    assert computed(engine, [*stem, *range(40, 52)]) == 24  # KV of the stem, but no state at its end
    assert engine.stats().prefix_cache_lost == 12
    assert computed(engine, [*stem, *range(50, 62)]) == 12
    assert engine.stats().prefix_cache_lost == 12
    assert [r.levelname for r in caplog.records if "--state-checkpoints" in r.getMessage()] == ["INFO"]


def test_oldest_checkpoint_goes_when_all_are_taken() -> None:
    engine = recurrent_engine(num_checkpoints=2)
    prompts = [[seed, *range(20, 29)] for seed in (1, 2, 3)]
    for prompt in prompts:
        answer(engine, prompt, max_tokens=1)
    assert engine.stats().checkpoints_used == 2
    assert computed(engine, prompts[2], max_tokens=1) == 2
    assert computed(engine, prompts[0], max_tokens=1) == 10
    assert engine.stats().prefix_cache_lost == 8


def test_checkpoint_of_a_hit_stays_when_a_later_one_was_not_used() -> None:
    engine = recurrent_engine(num_checkpoints=2)
    prompts = [[seed, *range(20, 29)] for seed in (1, 2, 3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        answer(engine, prompt, max_tokens=1)
    assert computed(engine, prompts[0], max_tokens=1) == 2
    assert computed(engine, prompts[1], max_tokens=1) == 10


def test_no_checkpoint_is_taken_when_the_request_stands_inside_of_a_block() -> None:
    """The state is ahead of the node then, although the node has lost its checkpoint."""
    slots = StateSlots(1, 1, BLOCK)
    params = SamplingParams(max_tokens=9)
    received = EngineRequest(request_id="a", prompt_ids=(1, 2, 3, 4), sampling=params, arrival=0.0)
    request = Request(received, [1, 2, 3, 4])
    slots.assign(request, 0)
    node = Node(b"", "", (1, 2, 3, 4))
    request.nodes.append(node)
    slots.save(request, BLOCK)
    assert slots.take_copies() == (StateCopy(0, 1),) and node.checkpoint == 1
    slots.drop(node)
    slots.save(request, BLOCK + 1)
    assert slots.take_copies() == () and node.checkpoint is None


def test_reset_drops_checkpoints_with_the_kv() -> None:
    engine = recurrent_engine()
    answer(engine, list(range(1, 20)))
    engine.reset_prefix_cache()
    assert engine.stats().checkpoints_used == 0
    assert computed(engine, list(range(1, 20))) == 19


def test_running_request_publishes_nothing_after_a_reset() -> None:
    """No new prompt could reach its blocks and checkpoints, whose parents are gone."""
    engine, prompt = recurrent_engine(), tuple(range(1, 10))
    params = SamplingParams(max_tokens=30, temperature=0.0)
    engine.add_request(EngineRequest(request_id="a", prompt_ids=prompt, sampling=params, arrival=0.0))
    said: list[int] = []
    for step in range(40):
        if step == 6:
            assert engine.stats().checkpoints_used > 0
            engine.reset_prefix_cache()
        for out in engine.step():
            said += out.token_ids
        if step >= 6:
            assert engine.stats().checkpoints_used == 0 and len(engine.scheduler.kv.cache or ()) == 0
    engine.scheduler.check()
    assert said == answer(plain_engine(), list(prompt), max_tokens=30)
    assert computed(engine, [*prompt, *said]) == 39


def test_request_publishes_again_when_it_was_preempted_after_a_reset() -> None:
    engine, prompt = recurrent_engine(), tuple(range(1, 10))
    params = SamplingParams(max_tokens=30, temperature=0.0)
    engine.add_request(EngineRequest(request_id="a", prompt_ids=prompt, sampling=params, arrival=0.0))
    said: list[int] = []
    for step in range(40):
        if step == 6:
            engine.reset_prefix_cache()
        if step == 12:
            engine.scheduler.preempt(engine.scheduler.running[0])
        for out in engine.step():
            said += out.token_ids
    assert computed(engine, [*prompt, *said]) == 3  # of 39 tokens, with a checkpoint after 36


def test_salted_prompts_share_no_state() -> None:
    engine = recurrent_engine()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for name, salt in (("a", ""), ("b", "tenant")):
        request = EngineRequest(
            request_id=name, prompt_ids=tuple(range(1, 20)), sampling=params, arrival=0.0, cache_salt=salt
        )
        engine.add_request(request)
        while engine.has_work:
            engine.step()
    assert engine.stats().prefix_cache_hits == 0 and engine.stats().checkpoints_used == 2


def test_preempted_request_gives_back_its_slot_and_gets_the_same_tokens() -> None:
    engine = recurrent_engine(
        num_blocks=14, num_state_slots=6, max_num_seqs=6, block_size=2, max_model_len=26
    )
    prompts = [[i + 1, *range(i % 7)] for i in range(12)]
    params = SamplingParams(max_tokens=18, temperature=0.0)
    assert engine.generate(prompts, params) == [answer(plain_engine(), p, max_tokens=18) for p in prompts]
    assert engine.stats().num_preemptions > 0 and engine.stats().state_slots_used == 0


def test_neighbours_of_a_failing_request_keep_their_states() -> None:
    engine = recurrent_engine(poison_token=63, max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    for name, prompt in (("a", (1, 2, 3)), ("b", (4, 5, 6, 7, 8, 9))):
        engine.add_request(EngineRequest(request_id=name, prompt_ids=prompt, sampling=params, arrival=0.0))
    tokens: dict[str, list[int]] = {"a": [], "b": [], "bad": []}
    errors = {}
    for step in range(40):
        if step == 3:
            engine.add_request(
                EngineRequest(request_id="bad", prompt_ids=(63,), sampling=params, arrival=0.0)
            )
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
            errors |= {out.request_id: out.error} if out.error else {}
    assert list(errors) == ["bad"]
    assert tokens["a"] == answer(plain_engine(), [1, 2, 3], max_tokens=8)
    assert tokens["b"] == answer(plain_engine(), [4, 5, 6, 7, 8, 9], max_tokens=8)


def test_manager_is_refused_when_kv_would_travel_without_its_state() -> None:
    with pytest.raises(ValueError, match="no room for a recurrent state"):
        KVManager(4, 2, PrefixCache(2), num_host_blocks=2, num_state_slots=1)

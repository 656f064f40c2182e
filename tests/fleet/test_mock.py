"""A mock engine answers as a function of the prompt alone, notices wrong KV, and takes the seconds of its costs."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.fleet.mock import MOCK_FACTORY, MOCK_FILE, MockModel, mock_engine, read_model
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support.timed_engine import Clock

FAST = MockModel(step_seconds=0.0, prompt_tokens_per_second=1e9, num_blocks=24)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = st.lists(st.integers(32, 34), min_size=1, max_size=40)


@given(st.lists(PROMPTS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_mock_engine_gives_the_answer_of_the_prompt_alone_when_requests_share_a_small_pool(
    prompts: list[list[int]],
) -> None:
    engine = mock_engine(FAST, EngineOptions(block_size=4, max_num_batched_tokens=32, max_model_len=64))
    for _ in range(2):  # the second time with a prefix cache
        assert engine.generate(prompts, GREEDY) == [FAST.answer(prompt, 12) for prompt in prompts]


@given(st.lists(PROMPTS, min_size=1, max_size=3), st.sampled_from([0.0, 1.0]), st.integers(32, 511))
@settings(deadline=None, max_examples=20)
def test_several_decode_steps_in_a_call_give_the_tokens_of_single_steps(
    prompts: list[list[int]], temperature: float, stop: int
) -> None:
    options = EngineOptions(block_size=4, max_num_batched_tokens=32, max_model_len=64)
    stops = (stop, FAST.answer(prompts[0], 12)[8])
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=3, stop_token_ids=stops)
    single, multi = (mock_engine(FAST, options, may_multi_step=several) for several in (False, True))
    assert multi.runner.is_multi_step
    assert multi.generate(prompts, sampling) == single.generate(prompts, sampling)


def test_mock_engine_gives_another_answer_when_a_cached_token_is_damaged() -> None:
    engine = mock_engine(FAST, EngineOptions(block_size=4))
    prompt = list(range(40, 60))
    (right,) = engine.generate([prompt], GREEDY)
    for block in range(FAST.num_blocks):
        engine.runner.write_block(block, engine.runner.read_block(block) ^ np.uint8(1))
    assert engine.generate([prompt], GREEDY) != [right]


def test_mock_engine_gives_other_answers_when_the_model_is_another() -> None:
    other = MockModel(step_seconds=0.0, answers=1)
    assert mock_engine(other).generate([[40]], GREEDY) != mock_engine(FAST).generate([[40]], GREEDY)


def test_seeded_answers_differ_by_seed_and_repeat_by_prompt() -> None:
    def answer(seed: int) -> list[list[int]]:
        return mock_engine(FAST).generate(
            [[40, 41]], SamplingParams(max_tokens=16, temperature=1.0, seed=seed)
        )

    assert answer(1) == answer(1) != answer(2)


def test_steps_take_the_seconds_of_the_costs() -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    model = MockModel(step_seconds=0.01, prompt_tokens_per_second=1000.0)
    engine = mock_engine(model, sleep=sleep, clock=clock)
    engine.generate([list(range(264))], SamplingParams(max_tokens=11, temperature=0.0))
    assert clock.now == pytest.approx(0.01 + 0.264 + 10 * 0.011, rel=1e-6)
    predicted = engine.scheduler.cost.prefill_seconds(264)
    assert predicted == pytest.approx(0.274, rel=0.1), "the engine knows its costs from the start"


def test_read_model_takes_the_vocabulary_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 777, "model_type": "llama"}))
    assert read_model(str(tmp_path)).vocab_size == 777
    (tmp_path / MOCK_FILE).write_text('{"step_seconds": 0.5}')
    assert read_model(str(tmp_path)) == MockModel(vocab_size=777, step_seconds=0.5)
    assert read_model('{"answers": 3}') == MockModel(answers=3)
    assert read_model("") == MockModel()


@pytest.mark.parametrize("text", ['{"speed": 1}', '{"vocab_size": "many"}', '{"lowest_token": 512}', "{"])
def test_read_model_names_the_fields_when_the_json_is_wrong(text: str) -> None:
    with pytest.raises(UserError, match="step_seconds"):
        read_model(text)


def test_factory_serves_the_same_answers_from_a_process() -> None:
    async def ask() -> tuple[list[TokenOutput], float]:
        client = EngineClient('{"step_seconds": 0.01}', factory=MOCK_FACTORY)
        await client.start()
        try:
            request = EngineRequest(
                request_id="a", prompt_ids=(40, 41, 42), sampling=GREEDY, arrival=time.monotonic()
            )
            start = time.monotonic()
            outputs = [output async for output in client.generate(request)]
            seconds = time.monotonic() - start
        finally:
            await client.stop()
        return outputs, seconds

    outputs, seconds = asyncio.run(ask())
    assert [output.token_ids for output in outputs] == [(t,) for t in MockModel().answer([40, 41, 42], 12)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert seconds >= 0.12

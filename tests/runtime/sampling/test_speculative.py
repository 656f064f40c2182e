"""Speculation: the answer is the same, right guesses save steps, wrong ones end."""

from __future__ import annotations

import pytest

from optkit.runtime.engine import Engine
from optkit.runtime.sampling.proposer import NgramProposer, Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.types import EngineRequest, SamplingParams
from tests.support import tiny_runtime
from tests.support.fakes import FakeRunner, fake_engine
from tests.support.speculation import Eager, needs_native


def eager(longest: int = 5) -> Speculator:
    return Speculator(NgramProposer(), Eager(CostModel(), longest))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repeating_model_takes_fewer_steps(temperature: float) -> None:
    """The fake repeats a script, whatever came before."""
    script = [5, 6, 7, 8]
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    engines = [fake_engine(options={"script": script}) for _ in range(2)]
    engines[1].scheduler.proposer = eager()
    plain, guessed = (engine.generate([[1, 2]], sampling) for engine in engines)
    assert plain == guessed
    steps, fewer = (len(engine.runner.batches) for engine in engines)
    assert fewer < 0.4 * steps
    stats = engines[1].stats()
    assert sum(stats.spec_decode_accepted_per_pos) > 20
    assert stats.spec_decode_draft_tokens >= sum(stats.spec_decode_accepted_per_pos)


def test_stop_tokens_and_the_length_end_an_answer_in_the_middle_of_a_draft() -> None:
    for options in ({"max_tokens": 11}, {"max_tokens": 40, "stop_token_ids": (8,), "min_tokens": 9}):
        sampling = SamplingParams(temperature=0.0, **options)
        engines = [fake_engine(options={"script": [5, 6, 7, 8, 9]}) for _ in range(2)]
        engines[1].scheduler.proposer = eager()
        plain, guessed = (engine.generate([[1, 2], [3, 4, 5, 6]], sampling) for engine in engines)
        assert plain == guessed
        assert engines[1].stats().kv_blocks_used == 0


def test_outputs_come_a_token_at_a_time() -> None:
    """So that a stop string, a count of tokens or a stream never sees a difference."""
    engine = fake_engine(options={"script": [5, 6]})
    engine.scheduler.proposer = eager()
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    engine.add_request(EngineRequest(request_id="r", prompt_ids=(1,), sampling=sampling, arrival=0.0))
    outputs = [out for _ in range(20) if engine.has_work for out in engine.step()]
    assert [len(out.token_ids) for out in outputs] == [1] * 20


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_a_model_says_the_same_with_guesses(temperature: float) -> None:
    some = [prompt + prompt for prompt in tiny_runtime.prompts(16)]
    some = [prompt[:90] for prompt in some]
    sampling = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=i, repetition_penalty=1.0 + 0.1 * (i % 2))
        for i in range(len(some))
    ]
    plain = tiny_runtime.engine().generate(some, sampling)
    speculator = eager()
    engine = tiny_runtime.engine(speculator, num_blocks=60)
    assert engine.generate(some, sampling) == plain
    assert speculator.stats.num_draft_tokens > 20
    assert engine.stats().kv_blocks_used == 0


def test_a_failing_draft_row_fails_nobody() -> None:
    """A guess may drive the model where it has no numbers; what was right before still counts."""

    class Brittle(FakeRunner):
        def execute(self, batch):  # type: ignore[no-untyped-def]
            logits = super().execute(batch)
            if any(item.draft for item in batch.items):
                logits[-1] = float("nan")
            return logits

    plain = fake_engine(options={"script": [5, 6]})
    engine = Engine(Brittle(script=[5, 6]), plain.config, proposer=eager())
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    assert engine.generate([[1]], sampling) == plain.generate([[1]], sampling)

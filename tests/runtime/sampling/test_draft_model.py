"""Guesses of a small model change no token of an answer."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.draft_model import DraftModel
from optkit.runtime.sampling.proposer import Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineRequest, SamplingParams
from tests.support import tiny_runtime
from tests.support.fakes import FakeRunner, fake_engine
from tests.support.graphs import captured
from tests.support.speculation import Eager, needs_native, sequence


def drafted(longest: int = 4, **draft: object) -> tuple[Engine, DraftModel]:
    """A fake engine whose guesses come from another fake that says the same, unless ``draft`` says otherwise."""
    options = {"num_blocks": 64, "block_size": 2} | draft
    source = DraftModel(FakeRunner(**options), max_model_len=64, max_num_batched_tokens=7, vocab_size=64)
    engine = fake_engine(options={"max_num_batched_tokens": 64})
    engine.scheduler.proposer = Speculator(source, Eager(CostModel(), longest))
    return engine, source


PROMPTS = [[3, 4, 5], list(range(20)), [7]]


@pytest.mark.parametrize(
    "draft",
    [{}, {"script": [5, 6]}, {"num_blocks": 9}, {"poison_token": 4}],
    ids=["right", "wrong", "too small", "failing"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_the_draft_model_says_the_answer_is_the_same(
    draft: dict[str, object], temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=2)
    plain = fake_engine().generate(PROMPTS, sampling)
    engine, source = drafted(**draft)
    assert engine.generate(PROMPTS, sampling) == plain
    assert source.blocks.num_used == 0 and not source._shadows
    source.blocks.check([])


def test_a_draft_model_that_is_right_saves_steps() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    engine, _ = drafted()
    engine.generate(PROMPTS, sampling)
    stats = engine.stats()
    assert sum(stats.spec_decode_accepted_per_pos) == stats.spec_decode_draft_tokens > 40
    assert len(engine.runner.batches) <= 6  # 20 tokens, five a step


@needs_native
def test_a_draft_model_leaves_an_answer_with_a_window_at_its_own_context() -> None:
    """The answer goes on beyond the contexts of both models, and the draft model holds no blocks for it."""
    window = RollingWindow(16, 2)
    request = EngineRequest(
        request_id="r",
        prompt_ids=(3, 4, 5),
        sampling=SamplingParams(max_tokens=200, temperature=0.0),
        arrival=0.0,
        rolling=window,
    )

    def answer(engine: Engine) -> list[int]:
        engine.add_request(request)
        return [
            token
            for _ in iter(lambda: engine.has_work, False)
            for o in engine.step()
            for token in o.token_ids
        ]

    engine, source = drafted()
    assert answer(engine) == answer(fake_engine(options={"max_num_batched_tokens": 64}))
    stats = engine.stats()
    assert 10 < sum(stats.spec_decode_accepted_per_pos) < 64
    assert source.blocks.num_used == 0 and not source._shadows


def test_two_models_say_what_the_large_one_says_alone() -> None:
    some = tiny_runtime.prompts(8)
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    plain = tiny_runtime.engine().generate(some, sampling)
    small = ModelRunner(tiny_runtime.int8_llama(), 100, 4)
    speculator = Speculator(DraftModel(small, 128, 16, small.vocab_size), Eager(CostModel(), 4))
    engine = tiny_runtime.engine(speculator)
    assert engine.generate(some, sampling) == plain
    assert sum(speculator.stats.accepted_per_pos) == speculator.stats.num_draft_tokens > 0


@functools.cache
def llama(vocab_size: int) -> Executable:
    """A tiny random model; those of other vocabularies are other models."""
    return lower(captured("llama", vocab_size=vocab_size))


@pytest.mark.parametrize("vocab_size", [192, 128, 100], ids=["larger", "equal", "smaller"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_of_another_vocabulary_changes_no_token(vocab_size: int, temperature: float) -> None:
    """Ids that only one of the two models has are neither guessed nor given to the other."""
    config = SchedulerConfig(**tiny_runtime.LIMITS)
    some = [[3, 4, 5], [6, 7, 8, 9] * 5, [100, 101], [39]]
    sampling = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(len(some))]
    runners = [ModelRunner(llama(128), config.num_blocks, config.block_size) for _ in range(2)]
    plain = Engine(runners[0], config).generate(some, sampling)
    draft = DraftModel(Watched(llama(vocab_size), 100, 4), 128, 16, vocab_size=128)
    engine = Engine(runners[1], config, proposer=Speculator(draft, Eager(CostModel(), 4)))
    assert engine.generate(some, sampling) == plain
    assert draft.runner.largest_id >= 0, "the draft model was never used"
    assert draft.runner.largest_id < vocab_size and draft.runner.num_failed == 0
    assert not draft._shadows and draft.blocks.num_used == 0


class Watched(ModelRunner):
    """Remembers the ids it was given, and how often it failed."""

    largest_id, num_failed = -1, 0

    def execute(self, batch: Batch) -> Tensor:
        self.largest_id = max(self.largest_id, *(t for item in batch.items for t in item.new_tokens))
        try:
            return super().execute(batch)
        except Exception:
            self.num_failed += 1
            raise


def test_a_guess_beyond_the_vocabulary_is_replaced_by_the_best_known_id() -> None:
    """The padding of a vocabulary may have the largest logit."""
    draft = DraftModel(FakeRunner(vocab_size=80, script=[70]), 64, 16, vocab_size=64)
    (guess,) = draft.draft([sequence([1, 2, 3])], [4])
    assert len(guess) == 4 and max(guess) < 64

"""Speculation: the answer is the same, right guesses save steps, wrong ones end."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels.cpu import native
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.draft_model import DraftModel
from optkit.runtime.sampling.proposer import PROBE_STEPS, Lengths, NgramProposer, Speculator
from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams
from tests.support import tiny_runtime
from tests.support.fakes import FakeRunner, fake_engine
from tests.support.graphs import captured

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


class Eager(Lengths):
    """As many as allowed, always."""

    def choose(self, sequences: Sequence[Request], seconds_per_token: float) -> list[int]:
        return [self.longest] * len(sequences)


def eager(longest: int = 5) -> Speculator:
    return Speculator(NgramProposer(), Eager(CostModel(), longest))


def sequence(ids: list[int]) -> Request:
    request = EngineRequest(
        request_id="r", prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=1), arrival=0.0
    )
    return Request(request, list(ids))


# -- prompt lookup --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "count", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),  # the three last tokens were seen
        ([9, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),  # only the two last
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, (8,)),  # the latest occurrence
        ([5, 6, 5, 6], 5, (5, 6, 5, 6, 5)),  # a repetition goes on
        ([1, 2, 3, 4], 3, ()),
        ([1], 3, ()),
        ([1, 2, 1, 2], 0, ()),
    ],
)
def test_what_followed_before_is_guessed(ids: list[int], count: int, draft: tuple[int, ...]) -> None:
    assert NgramProposer().draft([sequence(ids)], [count]) == [draft]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 59), st.integers(1, 5))
def test_the_index_grows_with_its_sequence(ids: list[int], cut: int, count: int) -> None:
    proposer, request = NgramProposer(), sequence(ids[:cut])
    proposer.draft([request], [count])
    request.token_ids += ids[cut:]
    assert proposer.draft([request], [count]) == NgramProposer().draft([sequence(ids)], [count])


# -- how many -------------------------------------------------------------------------------------------


def lengths(per_token: float) -> Lengths:
    """On a machine where a step costs 10 ms and each token ``per_token`` s more."""
    cost = CostModel()
    for tokens in (1, 2, 4, 8) * 40:
        cost.observe(StepWork(tokens, tokens, 0.0), 10e-3 + per_token * tokens)
    return Lengths(cost, 8)


def test_right_guesses_make_drafts_grow_and_wrong_ones_end_them() -> None:
    chooser, request = lengths(1e-3), sequence([1, 2, 3])
    first = chooser.choose([request], 0.0)[0]
    assert 1 <= first < 8
    for _ in range(10):
        chooser.observe(request, 8, 8)
    assert chooser.choose([request], 0.0) == [8]
    for _ in range(40):
        chooser.observe(request, 1, 0)
    quiet = [chooser.choose([request], 0.0)[0] for _ in range(2 * PROBE_STEPS)]
    assert sorted(set(quiet)) == [0, 1] and sum(quiet) == 2  # but now and then it tries again


def test_where_a_token_costs_as_much_as_a_step_nothing_is_guessed() -> None:
    cheap, dear = lengths(1e-3), lengths(50e-3)
    assert cheap.choose([sequence([1])], 0.0)[0] > 0
    assert dear.choose([sequence([1])], 0.0) == [0]
    assert cheap.choose([sequence([1])], 50e-3) == [0]  # the guess itself is dear


def test_a_full_batch_gains_less_from_a_guess() -> None:
    chooser = lengths(3e-3)
    alone = chooser.choose([sequence([1])], 0.0)[0]
    crowd = [sequence([1]) for _ in range(16)]
    assert max(chooser.choose(crowd, 0.0)) <= alone


# -- the answer -----------------------------------------------------------------------------------------


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


# -- a draft model ---------------------------------------------------------------------------------------


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

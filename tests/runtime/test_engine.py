"""The whole engine under random traffic: KV accounting, fairness, and outputs equal to a solo run."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from optkit.runtime.engine import MODEL_FAILED, Engine
from optkit.runtime.sampler import BAD_LOGITS
from optkit.runtime.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineRefusal, EngineRequest, FinishReason, SamplingParams
from tests.fakes import FakeRunner, fake_engine

VOCAB = 64


def request(name: str, prompt: list[int], **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | sampling)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0)


def run(
    engine: Engine, requests: list[EngineRequest]
) -> dict[str, tuple[list[int], FinishReason | None, str | None]]:
    """Serve all requests to their end: tokens, reason, error of each."""
    for r in requests:
        engine.add_request(r)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    ends = {}
    for _ in range(1000):
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                ends[out.request_id] = (out.finish_reason, out.error)
        engine.scheduler.check()
        if not engine.has_work:
            return {name: (tokens[name], *ends[name]) for name in tokens}
    raise AssertionError("the engine makes no progress")


def solo(r: EngineRequest, max_model_len: int = 64) -> tuple[list[int], FinishReason | None, str | None]:
    options = {
        "num_blocks": 64,
        "block_size": 1,
        "max_num_batched_tokens": 64,
        "max_model_len": max_model_len,
    }
    return run(fake_engine(options=options), [r])[r.request_id]


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 5),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), tuple(range(0, VOCAB, 8))]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
    )


class EngineMachine(RuleBasedStateMachine):
    """Random add, abort, preempt and step on a pool too small for everyone."""

    @initialize(
        seqs=st.integers(1, 5), budget=st.integers(5, 12), blocks=st.integers(9, 20), size=st.integers(1, 4)
    )
    def start(self, seqs: int, budget: int, blocks: int, size: int) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=24,
            block_size=size,
            num_blocks=blocks,
        )
        self.runner = FakeRunner(num_blocks=blocks, block_size=size, vocab_size=VOCAB)
        self.engine = Engine(self.runner, self.config)
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.total = 0

    @rule(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), sampling=sampling_params())
    def add(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.total += 1
        name = f"r{self.total}"
        r = EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival=0.0)
        need = min(len(prompt) + sampling.max_tokens, 24) - 1
        if need > self.config.num_blocks * self.config.block_size:
            with pytest.raises(EngineRefusal):
                self.engine.add_request(r)
            return
        self.engine.add_request(r)
        self.requests[name], self.tokens[name] = r, []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        out = self.engine.abort(name)
        assert out is not None and out.finish_reason is FinishReason.ABORT
        del self.requests[name]
        assert self.engine.abort(name) is None

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.engine.scheduler.preempt_youngest()

    @rule()
    def step(self) -> None:
        before = len(self.runner.batches)
        oldest = next(iter(self.requests), None)
        outputs = self.engine.step()
        assert (len(self.runner.batches) > before) == (oldest is not None)
        if oldest is not None:
            batch = self.runner.batches[-1]
            assert batch.num_tokens <= self.config.max_num_batched_tokens
            assert len(batch.items) <= self.config.max_num_seqs
            assert oldest in [item.seq.request.request_id for item in batch.items], (
                "the oldest request starved"
            )
        for out in outputs:
            self.tokens[out.request_id] += out.token_ids
            if out.finish_reason:
                self._finished(out.request_id, out.finish_reason)

    def _finished(self, name: str, reason: FinishReason) -> None:
        assert (self.tokens[name], reason, None) == solo(self.requests.pop(name), max_model_len=24)

    @invariant()
    def consistent(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.requests
        assert self.engine.stats().kv_blocks_used == 0


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_equal_the_solo_run_when_kv_is_scarce(temperature: float) -> None:
    requests = [
        request(f"r{i}", [i + 1, *range(i % 7)], max_tokens=20, temperature=temperature, seed=i)
        for i in range(12)
    ]
    engine = fake_engine(options={"num_blocks": 14, "block_size": 2, "max_num_seqs": 6})
    results = run(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert results == {r.request_id: solo(r) for r in requests}
    assert engine.stats().kv_blocks_used == engine.stats().num_running == engine.stats().num_waiting == 0


@pytest.mark.parametrize(("option", "message"), [("poison_token", MODEL_FAILED), ("nan_token", BAD_LOGITS)])
@pytest.mark.parametrize("length", [1, 30])
def test_a_failing_request_fails_alone(option: str, message: object, length: int) -> None:
    good = [request(f"r{i}", [i + 1], max_tokens=10) for i in range(6)]
    bad = request("bad", [63] * length, max_tokens=10)
    engine = fake_engine(options={option: 63, "max_num_batched_tokens": 8})
    # outputs of the good requests may sample 63 themselves: then they fail alone as well
    wanted = {r.request_id: run(fake_engine(options={option: 63}), [r])[r.request_id] for r in good}
    results = run(engine, [*good[:3], bad, *good[3:]])
    assert results.pop("bad") == ([], FinishReason.ERROR, message.message)
    assert results == wanted
    assert sum(reason is FinishReason.LENGTH for _, reason, _ in results.values()) >= 3
    assert engine.stats().kv_blocks_used == 0


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    engine = fake_engine()
    for bad in (-1, VOCAB):
        with pytest.raises(EngineRefusal, match=f"token {bad} is not in the vocabulary"):
            engine.add_request(request("r", [1, bad]))
    assert not engine.has_work


def test_generate_returns_the_outputs_in_prompt_order() -> None:
    prompts = [[3, 4, 5], [6], list(range(20))]
    outputs = fake_engine().generate(prompts, SamplingParams(max_tokens=5, temperature=0.0))
    assert outputs == [solo(request("r", p, max_tokens=5))[0] for p in prompts]
    with pytest.raises(RuntimeError, match=MODEL_FAILED.message):
        fake_engine(options={"poison_token": 1}).generate([[1]], SamplingParams(max_tokens=5))


def test_info_names_the_limits_and_the_memory_plan() -> None:
    info = fake_engine(options={"num_blocks": 33, "block_size": 4, "max_model_len": 64}).info()
    assert info["max_model_len"] == 64 and info["vocab_size"] == VOCAB
    assert info["memory_plan"]["num_sequences"] == 2
    assert info["memory_plan"]["num_tokens"] == 132
    assert info["memory_plan"]["dtype"] == "float32"


def test_the_runner_and_the_scheduler_must_agree() -> None:
    with pytest.raises(ValueError, match="disagree"):
        Engine(FakeRunner(num_blocks=3), fake_engine().config)


def test_the_fake_notices_a_wrong_block() -> None:
    """The checks above are worth something only if a wrong table changes the logits."""
    engine = fake_engine()
    engine.add_request(request("r", [1, 2, 3, 4, 5]))
    batch = engine.scheduler.schedule()
    right = engine.runner.execute(batch)
    engine.scheduler.update(batch, [7])
    item = engine.scheduler.schedule().items[0]
    good = engine.runner.execute(Batch((item,)))
    item.seq.block_table.reverse()
    assert not right.equal(good)
    assert not engine.runner.execute(Batch((item,))).equal(good)

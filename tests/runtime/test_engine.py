"""The whole engine: errors of one request, outputs equal to a solo run. Random histories: test_engine_machine.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optkit.runtime.engine import MODEL_FAILED, Engine, RequestFailed
from optkit.runtime.sampling.sampler import BAD_LOGITS
from optkit.runtime.types import Batch, EngineRefusal, EngineRequest, FinishReason, SamplingParams
from tests.support.fakes import FakeRunner, fake_engine

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
    """Alone, in one chunk, with nothing cached."""
    options = {
        "num_blocks": 64,
        "block_size": 1,
        "max_num_batched_tokens": 64,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,
    }
    return run(fake_engine(options=options), [r])[r.request_id]


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
    assert info.config.max_model_len == 64 and info.vocab_size == VOCAB
    assert info.memory_plan.num_sequences == 2
    assert info.memory_plan.num_tokens == 132
    assert info.memory_plan.dtype == "float32"


def test_the_runner_and_the_scheduler_must_agree() -> None:
    with pytest.raises(ValueError, match="disagree"):
        Engine(FakeRunner(num_blocks=3), fake_engine().config)


def test_the_fake_notices_a_wrong_block() -> None:
    """The checks above are worth something only if a wrong table changes the logits."""
    engine = fake_engine()
    engine.add_request(request("r", [1, 2, 3, 4, 5]))
    batch = engine.scheduler.schedule()
    right = engine.runner.execute(batch)
    engine.scheduler.update(batch, [(7,)])
    item = engine.scheduler.schedule().items[0]
    good = engine.runner.execute(Batch((item,)))
    item.request.block_tables[0].reverse()
    assert not np.array_equal(right, good)
    assert not np.array_equal(engine.runner.execute(Batch((item,))), good)


def test_texts_to_embed_take_turns_with_requests_and_small_steps_beside_them() -> None:
    """Alone a step of texts is as large as any; beside requests it is what a step may have of prompts."""
    sizes: list[int] = []
    engine = fake_engine(options={"prefill_target_tokens": 8, "embeds": {"vocab_size": 16}})
    engine.add_embedding("a", [[1] * 30], "last")
    assert engine.is_embedding and engine._embedder is not None
    runner: Any = engine._embedder.runner

    def largest() -> int:
        sizes.append(runner.batches[-1].num_tokens)
        return sizes[-1]

    assert [message.request_id for message in engine.embed_step()] == ["a"] and largest() == 30
    engine.add_request(request("r", [1, 2]))
    engine.step()
    engine.add_embedding("b", [[1] * 30], "last")
    while not engine.embed_step():
        assert largest() <= 8 and engine.step()
    assert max(sizes[1:]) == 8 and not engine.is_embedding


def test_texts_are_refused_aborted_and_embedded() -> None:
    engine = fake_engine(options={"embeds": {"vocab_size": 16}})
    for texts in ([], [[]], [[1] * 65], [[999]]):
        with pytest.raises(EngineRefusal):
            engine.add_embedding("wrong", texts, "last")
    assert engine.embed_step() == []
    engine.add_embedding("gone", [[1, 2], [3]], "mean")
    assert engine.abort("gone") is None and not engine.is_embedding
    assert engine.embed([[1, 2], [3]], "last").shape == (2, 16)
    engine = fake_engine(options={"embeds": {"vocab_size": 16, "poison_token": 9}})
    with pytest.raises(RequestFailed, match="the model failed"):
        engine.embed([[1, 2], [9]], "last")

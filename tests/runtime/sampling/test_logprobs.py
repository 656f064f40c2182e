"""Logprobs: against log_softmax of the model's logits, whatever the batch, the chunks and the preemptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.runtime.engine import MODEL_FAILED, Engine
from optkit.runtime.sampling import logprobs
from optkit.runtime.sampling.logprobs import FLOOR, logprobs_of
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenLogprob
from tests.support.fakes import FakeRunner, fake_engine

VOCAB = 64


def request(name: str, prompt: list[int], **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities [V] in float64 of ``logits`` [V]."""
    values = logits.astype(np.float64)
    return values - np.log(np.exp(values).sum())


class Answer:
    """Everything the engine said of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.generated: list[TokenLogprob] = []
        self.prompt: list[TokenLogprob] = []
        self.end: FinishReason | None = None
        self.error: str | None = None


def serve(engine: Engine, requests: list[EngineRequest], preempt_every: int = 0) -> dict[str, Answer]:
    answers = {r.request_id: Answer() for r in requests}
    for r in requests:
        engine.add_request(r)
    for step in range(2000):
        for out in engine.step():
            answer = answers[out.request_id]
            answer.tokens += out.token_ids
            answer.generated += out.logprobs
            answer.prompt += out.prompt_logprobs
            answer.end, answer.error = out.finish_reason, out.error
        if not engine.has_work:
            return answers
        if step < 12 and preempt_every and step % preempt_every == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    raise AssertionError("the engine makes no progress")


def expected(tokens: list[int], num_top: int) -> list[tuple[int, float, list[int]]]:
    """Token, logprob and likeliest tokens at each position from the second on, straight from the fake's logits."""
    engine = fake_engine(options={"max_model_len": 64, "max_num_batched_tokens": 64})
    runner, rows = engine.runner, []
    assert isinstance(runner, FakeRunner)
    for end in range(1, len(tokens)):
        logits = runner.logits_after(np.array(tokens[:end]))
        values = log_softmax(logits)
        top = np.argsort(-values)[:num_top].tolist()
        rows.append((tokens[end], float(values[tokens[end]]), top))
    return rows


def check(found: list[TokenLogprob], wanted: list[tuple[int, float, list[int]]]) -> None:
    assert len(found) == len(wanted)
    for entry, (token, value, top) in zip(found, wanted, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(value, abs=1e-5)
        assert [t for t, _ in entry.top] == top
        assert all(v <= 0 for _, v in entry.top)


@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=5),
    num_top=st.integers(0, 5),
    budget=st.integers(5, 30),
    piece=st.integers(1, 7),
    preempt_every=st.integers(0, 4),
)
def test_any_schedule_reports_each_position_once(
    prompts: list[list[int]], num_top: int, budget: int, piece: int, preempt_every: int
) -> None:
    options = {"num_blocks": 24, "max_num_batched_tokens": budget, "max_num_seqs": 5, "max_model_len": 40}
    engine = fake_engine(options=options)
    engine.logprobs._piece = piece
    requests = [
        request(f"r{i}", prompt, logprobs=num_top, prompt_logprobs=num_top if i % 2 == 0 else None)
        for i, prompt in enumerate(prompts)
    ]
    for r, answer in zip(requests, serve(engine, requests, preempt_every).values(), strict=True):
        wanted = expected([*r.prompt_ids, *answer.tokens], num_top)
        num_prompt = len(r.prompt_ids) - 1
        check(answer.generated, wanted[num_prompt:])
        check(answer.prompt, wanted[:num_prompt] if r.sampling.prompt_logprobs is not None else [])


def test_asking_for_logprobs_changes_no_token() -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    plain = serve(fake_engine(), [request(str(i), p, max_tokens=8) for i, p in enumerate(prompts)])
    asked = serve(
        fake_engine(),
        [request(str(i), p, max_tokens=8, logprobs=2, prompt_logprobs=2) for i, p in enumerate(prompts)],
    )
    assert [a.tokens for a in plain.values()] == [a.tokens for a in asked.values()]
    assert not any(a.generated or a.prompt for a in plain.values())


def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    steered = {
        "temperature": 1.7,
        "seed": 3,
        "logit_bias": ((5, 100.0),),
        "repetition_penalty": 1.5,
        "top_k": 3,
    }
    [answer] = serve(fake_engine(), [request("r", [1, 2], logprobs=1, **steered)]).values()
    assert answer.tokens == [5] * 4
    check(answer.generated, expected([1, 2, *answer.tokens], 1)[1:])


def test_a_stop_token_has_a_logprob_though_it_is_no_part_of_the_answer() -> None:
    engine = fake_engine(options={"script": [7, 8]})
    [answer] = serve(engine, [request("r", [1], logprobs=0, stop_token_ids=(8,))]).values()
    assert answer.end is FinishReason.STOP
    assert answer.tokens == [7]
    assert [entry.token_id for entry in answer.generated] == [7, 8]


def test_bad_logits_in_a_prompt_fail_only_that_request() -> None:
    engine = fake_engine(options={"nan_token": 63})
    requests = [request("bad", [1, 63, 2], prompt_logprobs=1), request("good", [1, 2, 3], prompt_logprobs=1)]
    answers = serve(engine, requests)
    assert (answers["bad"].end, answers["bad"].error) == (FinishReason.ERROR, MODEL_FAILED.message)
    assert answers["bad"].prompt == []
    assert answers["good"].end is FinishReason.LENGTH
    check(answers["good"].prompt, expected([1, 2, 3], 1))


def test_zero_probability_is_a_number() -> None:
    logits = np.array([[0.0, -np.inf, 1.0]], dtype=np.float32)
    [entry] = logprobs_of(logits, [1], 3)
    assert entry.logprob == FLOOR
    assert entry.top[-1] == (1, FLOOR)
    with pytest.raises(ValueError, match="numbers"):
        logprobs_of(np.array([[0.0, np.nan]], dtype=np.float32), [0], 0)


@pytest.mark.parametrize("row", [[0.0, np.nan], [np.nan] * 3, [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("num_top", [0, 2])
def test_a_row_without_a_distribution_has_no_logprobs(row: list[float], num_top: int) -> None:
    logits = np.array([[0.0] * len(row), row], dtype=np.float32)
    with pytest.raises(ValueError, match="numbers"):
        logprobs_of(logits, [0, 0], num_top)


@pytest.mark.parametrize("shift", [0.0, 80.0, -3e4, 1e30])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_logprobs_are_those_of_float64(spread: float, shift: float) -> None:
    """Also of large logits, whose exponentials are no numbers, and of a whole vocabulary."""
    dice = np.random.default_rng(2)
    logits = (spread * dice.standard_normal((2, 50_257), dtype=np.float32) + shift).astype(np.float32)
    wanted = [log_softmax(row - np.float64(row.max())) for row in logits]
    found = logprobs_of(logits, [7, 50_256], 20)
    for entry, values, token in zip(found, wanted, [7, 50_256], strict=True):
        order = np.argsort(-values, kind="stable")[:20].tolist()
        assert entry.logprob == pytest.approx(values[token], abs=1e-5)
        assert [t for t, _ in entry.top] == order
        assert [v for _, v in entry.top] == pytest.approx(values[order].tolist(), abs=1e-5)


def test_equally_likely_tokens_are_listed_by_their_number() -> None:
    logits = np.array([[1.0, 3.0, 0.0, 3.0, 3.0, 1.0]] * 2, dtype=np.float32)
    for entry in logprobs_of(logits, [3, 0], 4):
        assert [token for token, _ in entry.top] == [1, 3, 4, 0]
        assert entry.logprob == dict(entry.top)[entry.token_id]


@pytest.mark.parametrize("tensors", [True, False])
def test_logits_of_scored_and_plain_items_are_an_array_in_the_order_of_the_batch(tensors: bool) -> None:
    engine = fake_engine()
    execute = engine.runner.execute
    if tensors:
        engine.runner.execute = lambda batch: torch.from_numpy(execute(batch))  # type: ignore[method-assign]
    for name, prompt_logprobs in (("a", None), ("b", 1), ("c", None)):
        engine.add_request(request(name, [1, 2, ord(name) - 90], prompt_logprobs=prompt_logprobs))
    batch = engine.scheduler.schedule()
    found = engine.logprobs.execute(batch)
    assert isinstance(found, np.ndarray) and found.dtype == np.float32
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    wanted = [runner.logits_after(np.array(item.request.token_ids)) for item in batch.items]
    assert np.array_equal(found, np.stack(wanted))


def test_a_long_prompt_is_scored_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 10 * VOCAB)
    engine = fake_engine(options={"max_num_batched_tokens": 64, "max_model_len": 64})
    prompt = [i % VOCAB for i in range(50)]
    [answer] = serve(engine, [request("r", prompt, prompt_logprobs=0)]).values()
    assert len(answer.prompt) == 49
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert max(sum(item.num_logits for item in batch.items) for batch in runner.batches) == 10


def test_a_warm_prefix_cache_takes_nothing_from_the_scores() -> None:
    prompt = list(range(1, 30))
    scored = {"prompt_logprobs": 2, "logprobs": 2}
    cold = serve(fake_engine(), [request("cold", prompt, **scored)])["cold"]
    engine = fake_engine()
    serve(engine, [request("first", prompt)])
    answers = serve(engine, [request("warm", prompt, **scored), request("plain", prompt)])
    assert engine.stats().prefix_cache_hits > 0  # the plain one read what was cached
    assert (answers["warm"].prompt, answers["warm"].generated) == (cold.prompt, cold.generated)

"""The token that ends an answer is counted, as OpenAI and vLLM count it, by everything that counts tokens."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.serve.test_metrics import samples
from tests.support.serve_fakes import SteppedEngine, events, post, tiny_app
from tests.support.tiny_tokenizer import fast_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = fast_tokenizer().token_to_id("<|im_end|>")
WORD = fast_tokenizer().encode("the").ids[:1]
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES = {CHAT: HELLO, COMPLETIONS: {"prompt": "Hello"}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def app(script: list[int]) -> Any:
    return tiny_app(SteppedEngine(script=script))


def usages(script: list[int], path: str, **fields: Any) -> list[int]:
    """``completion_tokens`` of the whole answer, of the stream's last choice event and of its usage event."""
    body = {**BODIES[path], "max_tokens": 50, **fields}
    whole = post(app(script), path, body).json()["usage"]["completion_tokens"]
    answer = post(app(script), path, {**body, "stream": True, "stream_options": USAGE})
    *_, last, total, _done = events(answer.text)
    return [whole, *(json.loads(event)["usage"]["completion_tokens"] for event in (last, total))]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num_words", [0, 1, 5])
def test_usage_counts_the_end_token(path: str, num_words: int) -> None:
    assert usages([*WORD * num_words, EOS], path) == [num_words + 1] * 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_counts_a_stop_token_of_the_request(path: str) -> None:
    assert usages([*WORD, 7], path, stop_token_ids=[7]) == [2] * 3


def test_usage_does_not_exceed_max_tokens() -> None:
    assert usages([*WORD, EOS], CHAT, max_tokens=2) == [2] * 3
    assert usages([*WORD, EOS], CHAT, max_tokens=1) == [1] * 3
    assert usages([EOS], CHAT, max_tokens=1) == [1] * 3


def test_usage_counts_an_ignored_end_token_once() -> None:
    assert usages([*WORD, EOS], CHAT, max_tokens=4, ignore_eos=True) == [4] * 3


def test_scoring_a_prompt_generates_and_counts_no_token() -> None:
    body = {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    assert post(app([EOS]), COMPLETIONS, body).json()["usage"]["completion_tokens"] == 0


def test_metrics_and_log_count_what_usage_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "optkit.serve")
    server = app([EOS])
    assert post(server, CHAT, HELLO).json()["usage"]["completion_tokens"] == 1
    got = samples(server)
    assert got["vllm:generation_tokens_total", ""] == 1
    assert got["vllm:request_generation_tokens_sum", ""] == 1
    assert got["vllm:time_to_first_token_seconds_count", ""] == 1
    assert got["vllm:prompt_tokens_total", ""] > 0
    [event] = [record.event for record in caplog.records if hasattr(record, "event")]
    assert event["completion_tokens"] == 1


def test_time_per_token_spreads_over_the_end_token_too() -> None:
    """(last - first) / (tokens - 1) with both ends of the same count."""
    server = app([*WORD * 3, EOS])
    post(server, CHAT, HELLO)
    got = samples(server)
    decode = got["vllm:request_decode_time_seconds_sum", ""]
    assert got["vllm:inter_token_latency_seconds_count", ""] == 3
    assert got["vllm:request_time_per_output_token_seconds_sum", ""] == pytest.approx(decode / 3)
    assert got["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(decode)

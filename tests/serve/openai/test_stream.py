"""Server-sent events: chunks, usage, the end of a stream, an error inside one."""

from __future__ import annotations

import json

from tests.support.http_calls import CHAT, COUNTED, HELLO, TOKENS, chunks
from tests.support.serve_fakes import FakeEngine, events, post, tiny_app
from tests.support.tiny_tokenizer import TEXT


def test_role_travels_with_the_first_content_and_each_token_has_a_chunk() -> None:
    got = chunks(HELLO)
    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"]
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert len([delta for delta in deltas if delta.get("content")]) == TOKENS
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in got]
    assert reasons == [None] * (len(got) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in got}) == 1
    assert all("usage" not in chunk for chunk in got)


def test_usage_chunk_comes_last_and_is_null_before() -> None:
    *body, last = chunks({**HELLO, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == COUNTED


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in chunks({**HELLO, "stream_options": options})]
    assert counts == [*range(1, TOKENS + 1), COUNTED, COUNTED]


def test_an_answer_without_text_still_has_role_and_reason() -> None:
    [only] = chunks(HELLO, FakeEngine(""))
    assert only["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["finish_reason"] == "stop"


def test_error_inside_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail_after = 3
    answer = post(tiny_app(engine), CHAT, {**HELLO, "stream": True})
    assert answer.status_code == 200
    *_, error, done = events(answer.text)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "internal_error"
    assert "secret" not in answer.text

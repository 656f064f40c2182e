"""Requests with a rolling window over HTTP: longer than the context, refused where wrong, honest in ``usage``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.serve_fakes import SteppedEngine, events, post, tiny_app

LIMITS = {"max_model_len": 64, "block_size": 4, "num_blocks": 64}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [7] * 20, "max_tokens": 100, "ignore_eos": True}
WINDOW = {"rolling_window": 16, "sink_tokens": 2}

STREAMED: dict[str, dict[str, Any]] = {  # what a stream needs for its usage
    "/v1/messages": {},
    "/v1/responses": {},
    CHAT: {"stream_options": {"include_usage": True}},
}


def app(**options: Any) -> FastAPI:
    return tiny_app(SteppedEngine(**LIMITS, **options), **LIMITS, **options)


def usage(app: FastAPI, **fields: Any) -> dict[str, Any]:
    answer = post(app, COMPLETIONS, LONG | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_an_answer_goes_on_beyond_the_context_and_says_what_it_forgot() -> None:
    found = usage(app(), **WINDOW)
    assert found["completion_tokens"] == 100
    assert found["forgotten_tokens"] == (119 - 2 - 16) // 4 * 4


def test_a_stream_says_at_its_end_what_was_forgotten() -> None:
    body = LONG | WINDOW | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(app(), COMPLETIONS, body).text)
    assert json.loads(chunks[-2])["usage"]["forgotten_tokens"] == 100


def test_without_a_window_nothing_is_said_and_the_context_ends() -> None:
    answer = post(app(), COMPLETIONS, LONG)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "forgotten_tokens" not in usage(app(), max_tokens=30)


def test_the_option_of_the_server_is_for_requests_that_do_not_choose() -> None:
    rolling = app(rolling_window=16, sink_tokens=2)
    assert usage(rolling)["forgotten_tokens"] == 100
    assert usage(rolling, sink_tokens=4, rolling_window=8)["forgotten_tokens"] == (119 - 4 - 8) // 4 * 4
    refused = post(rolling, COMPLETIONS, LONG | {"rolling_window": 0})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_longer_than_the_context_is_read_through_the_window() -> None:
    found = usage(app(), prompt=[7] * 300, max_tokens=3, **WINDOW)
    assert found["prompt_tokens"] == 300 and found["forgotten_tokens"] == (302 - 2 - 16) // 4 * 4


@pytest.mark.parametrize(("asked", "kept"), [(-1, 63), (50, 50), (250, 250)])
def test_a_prompt_is_cut_to_the_context_or_as_asked(asked: int, kept: int) -> None:
    found = usage(app(), prompt=[7] * 300, max_tokens=100, truncate_prompt_tokens=asked, **WINDOW)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (kept, 100)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 90}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 90}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 90}),
    ],
)
def test_every_endpoint_says_what_was_forgotten(path: str, body: dict[str, Any]) -> None:
    """The window is that of the server where an endpoint has no such field."""
    rolling = tiny_app(SteppedEngine(**LIMITS, script=[40], **WINDOW), **LIMITS, **WINDOW)
    found = post(rolling, path, {"model": "tiny", "temperature": 0, **body}).json()["usage"]
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    assert found["forgotten_tokens"] == (prompt + 90 - 1 - 2 - 16) // 4 * 4 > 40
    streamed = post(
        rolling, path, {"model": "tiny", "temperature": 0, "stream": True, **body, **STREAMED[path]}
    )
    assert f'"forgotten_tokens":{found["forgotten_tokens"]}' in streamed.text.replace(" ", "")


def test_choices_add_up() -> None:
    assert usage(app(), n=2, **WINDOW)["forgotten_tokens"] == 200


def test_a_chat_without_max_tokens_ends_with_the_context() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, **WINDOW}
    found = post(app(), CHAT, body).json()["usage"]
    assert found["total_tokens"] == LIMITS["max_model_len"]


def test_a_prompt_is_whole_when_the_window_is_the_server_s() -> None:
    found = usage(app(rolling_window=16, sink_tokens=2), specprefill=True)
    assert found["forgotten_tokens"] == 100 and "specprefill_kept_tokens" not in json.dumps(found)


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"rolling_window": -1}, "rolling_window", "greater than or equal to 0"),
        ({"rolling_window": 63}, "rolling_window", "has room for 60"),
        ({"sink_tokens": 3}, "sink_tokens", "needs a 'rolling_window'"),
        ({"rolling_window": 16, "sink_tokens": 5}, "sink_tokens", "sink_tokens must be 0 to 4"),
        ({"rolling_window": 16, "use_beam_search": True}, "rolling_window", "use_beam_search"),
        ({"rolling_window": 16, "sink_tokens": 1, "specprefill": True}, "specprefill", "reads prompts whole"),
    ],
)
def test_a_window_that_does_not_fit_is_400(fields: dict[str, Any], param: str, what: str) -> None:
    answer = post(app(), COMPLETIONS, {"prompt": [7] * 5, "max_tokens": 4} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and what in error["message"]


def test_a_model_that_needs_all_tokens_refuses_with_the_reason() -> None:
    answer = post(app(keeps_all="it counts"), COMPLETIONS, LONG | WINDOW)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("this model can't forget tokens: it counts")
    answer = post(app(keeps_all="it counts"), COMPLETIONS, LONG | {"rolling_window": 16, "sink_tokens": 5})
    assert answer.json()["error"]["param"] == "rolling_window"  # whatever the sinks

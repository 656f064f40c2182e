"""Fields of a request: the limits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import (
    FakeEngine,
    post,
    tiny_app,
)

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 512}, "messages"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [302]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
    ({"messages": [{"role": "root", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2**63}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logit_bias": {"302": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [302]}, "allowed_token_ids"),
    ({"allowed_token_ids": [7], "stop_token_ids": [7, 8], "min_tokens": 1}, "allowed_token_ids"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1, "max_tokens": 600}, "truncate_prompt_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"guided_regex": ["(a+)+b"]}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[str(f)[:40] for f, _ in BAD_FIELDS])
def test_bad_field_is_400_and_named(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), CHAT, {**HELLO, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[1], []],
        None,
        5,
        {"a": 1},
        [1, "a"],
        ["a", [1]],
        [302],
        [-1],
        [2**63],
        [True],
        [1.5],
    ]
    + [["a"] * 65, "a " * 3000, [1] * 600, [[1] * 600], ["ok", "a " * 3000]],
    ids=lambda prompt: str(prompt)[:30],
)
def test_bad_prompt_is_400(prompt: Any) -> None:
    engine = FakeEngine()
    answer = post(tiny_app(engine), COMPLETIONS, {"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert not engine.requests


def test_limits_themselves_are_accepted() -> None:
    at_limit = {"stop": ["a" * 256] * 4, "max_tokens": 400, "seed": -(2**63), "min_tokens": 400, "top_k": -1}
    inert = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "logit_bias": None}
    assert post(tiny_app(), CHAT, {**HELLO, **at_limit, **inert, "user": "me"}).status_code == 200
    nulls = dict.fromkeys(("stop", "max_tokens", "temperature", "top_p", "seed", "n", "stream"))
    assert post(tiny_app(), CHAT, {**HELLO, **nulls}).status_code == 200
    assert post(tiny_app(), COMPLETIONS, {"prompt": ["a"] * 64}).status_code == 200
    most = {"n": 128, "logprobs": True, "top_logprobs": 20, "logit_bias": {str(i): -100 for i in range(302)}}
    assert post(tiny_app(), CHAT, {**HELLO, **most, "max_tokens": 1}).status_code == 200
    assert post(tiny_app(), COMPLETIONS, {"prompt": ["a"] * 64, "n": 2, "logprobs": 20}).status_code == 200


def test_context_error_gives_the_numbers() -> None:
    message = post(tiny_app(), COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 13}).json()["error"][
        "message"
    ]
    assert all(number in message for number in ("500", "13", "512"))
    assert post(tiny_app(), COMPLETIONS, {"prompt": [1] * 500, "max_tokens": 12}).status_code == 200


def test_unknown_fields_are_logged_and_accepted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optkit.serve")
    assert post(tiny_app(), CHAT, {**HELLO, "frob\nnicate": 1, "thrice": True}).status_code == 200
    assert "ignoring unknown fields: frob\\nnicate, thrice" in caplog.text

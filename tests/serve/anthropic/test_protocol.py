"""Anthropic's requests mean what the same chat request means; wrong ones are refused in Anthropic's words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_templates import QWEN, QWEN3
from tests.support.http_calls import CHAT
from tests.support.serve_fakes import FakeEngine, call, post, prompt_of, tiny_app

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
CHAT_CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}


def engine_request(path: str, body: dict[str, Any], template: str = QWEN) -> Any:
    """The engine's request for ``body``: prompt and sampling parameters."""
    engine = FakeEngine()
    answer = post(tiny_app(engine, template, max_model_len=4096), path, body)
    assert answer.status_code == 200, answer.text
    [request] = engine.requests
    return prompt_of(request), request.sampling


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ({}, {}),
        ({"system": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, *HELLO["messages"]]}),
        (
            {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {}}]},
            {"messages": [{"role": "system", "content": "Be\nbrief."}, *HELLO["messages"]]},
        ),
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 7}, {"temperature": 0.3, "top_p": 0.5, "top_k": 7}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [{**TOOL, "type": "custom"}], "tool_choice": {"type": "none"}}, {}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                            {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
                             "content": [{"type": "text", "text": "no net"}]},
                            {"type": "text", "text": "And?"},
                        ],
                    },
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": "a\nb"},
                    {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
                    {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no net"},
                    {"role": "user", "content": "And?"},
                ]
            },
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
        (
            {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Well,"}]},
            {
                "messages": [*HELLO["messages"], {"role": "assistant", "content": "Well,"}],
                "continue_final_message": True,
            },
        ),
    ],
)  # fmt: skip
def test_request_is_that_of_the_chat_endpoint(messages: dict[str, Any], chat: dict[str, Any]) -> None:
    assert engine_request(MESSAGES, {**HELLO, **messages}) == engine_request(CHAT, {**HELLO, **chat})


@pytest.mark.parametrize(("kind", "shown"), [("enabled", False), ("adaptive", False), ("disabled", True)])
def test_thinking_is_switched_off_where_the_template_can(kind: str, shown: bool) -> None:
    prompt, _ = engine_request(MESSAGES, {**HELLO, "thinking": {"type": kind, "budget_tokens": 1024}}, QWEN3)
    assert ("</think>" in prompt) == shown


def test_tokens_are_counted_as_they_are_used() -> None:
    body = {**HELLO, "tools": [TOOL], "system": "Be brief."}
    app = tiny_app(template=QWEN, max_model_len=4096)
    counted = post(app, COUNT, {name: value for name, value in body.items() if name != "max_tokens"})
    assert counted.json() == {"input_tokens": post(app, MESSAGES, body).json()["usage"]["input_tokens"]}


USER = {"role": "user"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{**USER, "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{**USER, "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{**USER, "content": [CALL]}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "input": "x"}]}]}, "input"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "maximum context length"),
    ],
)
def test_wrong_request_is_refused_in_anthropic_s_shape(body: dict[str, Any], word: str) -> None:
    answer = post(tiny_app(template=QWEN), MESSAGES, {**HELLO, **body})
    assert answer.status_code == 400 and set(answer.json()) == {"type", "error"}
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"output_config": {"format": {"type": "yaml"}}}, "'output_config.type': Input should be 'text'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "'output_config': the schema has",
        ),
        (
            {"messages": [{"role": "assistant", "content": []}]},
            "'messages' needs a last message of the assistant",
        ),
        ({"tools": [TOOL], "tool_choice": "auto"}, "'tool_choice': must be an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'tool_choice.name': Field required"),
    ],
)
def test_errors_speak_of_anthropic_s_fields_alone(body: dict[str, Any], message: str) -> None:
    answer = post(tiny_app(template=QWEN), MESSAGES, {**HELLO, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_other_errors_have_anthropic_s_shape_too() -> None:
    unknown = post(tiny_app(), MESSAGES, {**HELLO, "model": "claude"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    wrong_method = call(tiny_app(), "GET", MESSAGES)
    assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"x-api-key": "k"}, 200), ({"authorization": "Bearer k"}, 200), ({}, 401), ({"x-api-key": "j"}, 401)],
)
def test_key_comes_in_either_header(headers: dict[str, str], status: int) -> None:
    app = tiny_app(api_keys=("k",))
    answer = call(app, "POST", MESSAGES, json=HELLO, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error" and answer.json()["type"] == "error"

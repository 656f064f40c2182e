"""Responses requests mean what the same chat request means; what would need a memory is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.anthropic.test_protocol import CHAT_CALL, CHAT_TOOL, SCHEMA, engine_request
from tests.support.chat_templates import QWEN
from tests.support.http_calls import CHAT
from tests.support.serve_fakes import post, tiny_app

RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
NAME = {"type": "function", "name": "get_weather"}
CALL = {"type": "function_call", "call_id": "toolu_1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "toolu_1", "output": "rain"}
CHAT_RESULT = {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"}


@pytest.mark.parametrize(
    ("responses", "chat"),
    [
        ({}, {}),
        ({"input": [USER]}, {}),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}, {}),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
        ({"input": [{**USER, "role": "developer"}]}, {"messages": [{**USER, "role": "system"}]}),
        ({"max_output_tokens": 7, "temperature": 0.1}, {"max_tokens": 7, "temperature": 0.1}),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": NAME},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAME]}},
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        (
            {"input": [USER, CALL, CALL, RESULT, {"type": "message", "role": "user", "content": "And?"}]},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL]},
                    CHAT_RESULT,
                    {"role": "user", "content": "And?"},
                ]
            },
        ),
        (
            {
                "input": [
                    USER,
                    {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                    },
                    CALL,
                    {**RESULT, "output": [{"type": "input_text", "text": "rain"}]},
                ]
            },
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL], "reasoning_content": "Hm."},
                    CHAT_RESULT,
                ]
            },
        ),
    ],
)  # fmt: skip
def test_request_is_that_of_the_chat_endpoint(responses: dict[str, Any], chat: dict[str, Any]) -> None:
    ours = engine_request(RESPONSES, {"input": "Hello", "max_output_tokens": 50, **responses})
    assert ours == engine_request(CHAT, {"messages": [USER], "max_tokens": 50, **chat})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
    ],
)
def test_wrong_request_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    answer = post(tiny_app(template=QWEN), RESPONSES, {"input": "Hello", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    "fields", [{"store": False}, {"include": ["reasoning.encrypted_content"]}, {"metadata": {"a": "b"}}]
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert post(tiny_app(), RESPONSES, {"input": "Hello", **fields}).json()["store"] is False

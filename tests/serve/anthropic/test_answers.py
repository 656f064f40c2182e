"""Messages, whole and streamed, through Anthropic's unmodified client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from optkit.runtime.types import EngineRequest
from tests.serve.anthropic.test_protocol import HELLO, MESSAGES, TOOL
from tests.support.chat_templates import QWEN, QWEN3
from tests.support.serve_fakes import FakeEngine, post, prompt_of, served, tiny_app
from tests.support.tiny_tokenizer import TEXT, tiny_tokenizer

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[test]'")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nOk."


@contextmanager
def client(script: str | Callable[[EngineRequest], str] = TEXT, template: str = QWEN) -> Iterator[Any]:
    app = tiny_app(FakeEngine(script), template, max_model_len=4096)
    with served(app) as url, anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as api:
        yield api


def create(script: str, template: str = QWEN, **fields: Any) -> Any:
    with client(script, template) as api:
        return api.messages.create(model="tiny", **{**HELLO, "max_tokens": 400, **fields})


def stream(script: str, template: str = QWEN, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and the message that the client makes of them."""
    options = {**HELLO, "max_tokens": 400, **fields}
    with client(script, template) as api, api.messages.stream(model="tiny", **options) as events:
        return list(events), events.get_final_message()


@pytest.mark.parametrize(
    ("script", "template", "fields", "kinds", "reason"),
    [
        (TEXT, QWEN, {}, ["text"], "end_turn"),
        ("", QWEN, {}, [], "end_turn"),
        (TEXT, QWEN, {"max_tokens": 5}, ["text"], "max_tokens"),
        (TEXT, QWEN, {"stop_sequences": ["how"]}, ["text"], "stop_sequence"),
        (f"I look.\n{CALL}", QWEN, {"tools": [TOOL]}, ["text", "tool_use"], "tool_use"),
        (f"{CALL}\n{CALL}", QWEN, {"tools": [TOOL]}, ["tool_use", "tool_use"], "tool_use"),
        (THOUGHT + CALL, QWEN3, {"tools": [TOOL]}, ["thinking", "text", "tool_use"], "tool_use"),
    ],
)  # fmt: skip
def test_stream_and_whole_answer_are_the_same_message(
    script: str, template: str, fields: dict[str, Any], kinds: list[str], reason: str
) -> None:
    whole = create(script, template, **fields)
    events, streamed = stream(script, template, **fields)
    assert [block.type for block in whole.content] == kinds
    assert (whole.stop_reason, streamed.stop_reason) == (reason, reason)
    assert whole.stop_sequence == streamed.stop_sequence
    names = {"id", "caller", "citations", "parsed_output"}
    assert [block.model_dump(exclude=names) for block in whole.content] == [
        block.model_dump(exclude=names) for block in streamed.content
    ]
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        streamed.usage.input_tokens,
        streamed.usage.output_tokens,
    )
    assert events[0].type == "message_start" and events[-1].type == "message_stop"


def test_message_has_text_usage_and_stop_sequence() -> None:
    message = create(TEXT, stop_sequences=["how"])
    assert message.id.startswith("msg_") and (message.type, message.role, message.model) == (
        "message",
        "assistant",
        "tiny",
    )
    assert message.content[0].text == "Hello there, " and message.stop_sequence == "how"
    tokens = len(tiny_tokenizer().encode(TEXT.partition("how")[0] + "how"))
    assert message.usage.output_tokens >= tokens and message.usage.input_tokens > 0


def test_events_of_a_call_come_in_anthropic_s_order() -> None:
    events, message = stream(f"I look.\n{CALL}", tools=[TOOL])
    kinds = [event.type for event in events if event.type not in ("text", "input_json", "thinking")]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"city": "Oslo"}
    assert message.content[1].id.startswith("toolu_")


@pytest.mark.parametrize("text", ['{"city": }', '{"city": "\\ud83d"}', '{"city": NaN}', '{"city": 1e999}'])
def test_malformed_arguments_are_wrapped_in_a_whole_answer(text: str) -> None:
    message = create(f'<tool_call>{{"name": "get_weather", "arguments": {text}}}</tool_call>', tools=[TOOL])
    assert message.content[0].input == {"INVALID_JSON": text}


def test_the_last_value_of_a_repeated_argument_counts() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "a", "city": "b"}}</tool_call>'
    assert create(text, tools=[TOOL]).content[0].input == {"city": "b"}


def test_failure_inside_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail_after = 3
    text = post(tiny_app(engine), MESSAGES, {**HELLO, "stream": True}).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    assert "secret" not in text


def test_wrong_request_is_the_client_s_own_error() -> None:
    with client() as api, pytest.raises(anthropic.BadRequestError):
        api.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "x" * 5000}])
    with client() as api, pytest.raises(anthropic.NotFoundError):
        api.messages.create(model="claude", **HELLO)


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(20, "max_tokens"), (3000, "model_context_window_exceeded")]
)
def test_answer_ends_with_the_context_as_at_anthropic(max_tokens: int, reason: str) -> None:
    app = tiny_app(FakeEngine("x" * 300), max_model_len=100)
    body = {**HELLO, "max_tokens": max_tokens}
    whole = post(app, MESSAGES, body).json()
    assert whole["stop_reason"] == reason
    used = whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    assert used == 100 if reason != "max_tokens" else used < 100
    streamed = post(app, MESSAGES, {**body, "stream": True}).text
    assert f'"stop_reason":"{reason}"' in streamed


def test_tokens_are_counted() -> None:
    with client() as api:
        assert (
            api.messages.count_tokens(model="tiny", messages=HELLO["messages"], tools=[TOOL]).input_tokens
            > 50
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loop_ends(streamed: bool) -> None:
    def script(request: EngineRequest) -> str:
        return "It rains." if "rain in Oslo" in prompt_of(request) else f"I look.\n{CALL}"

    with client(script) as api:
        messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
        for _ in range(3):
            options: Any = {"model": "tiny", "max_tokens": 400, "messages": messages, "tools": [TOOL]}
            if streamed:
                with api.messages.stream(**options) as events:
                    message = events.get_final_message()
            else:
                message = api.messages.create(**options)
            if message.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"rain in {block.input['city']}"}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
        assert (len(messages), message.content[0].text) == (3, "It rains.")

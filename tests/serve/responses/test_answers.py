"""Responses, whole and streamed, through the unmodified ``openai`` client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from optkit.runtime.types import EngineRequest
from tests.serve.responses.test_protocol import RESPONSES, TOOL
from tests.support.chat_templates import QWEN, QWEN3
from tests.support.serve_fakes import FakeEngine, post, prompt_of, served, tiny_app
from tests.support.tiny_tokenizer import TEXT

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@contextmanager
def client(
    script: str | Callable[[EngineRequest], str] = TEXT, template: str = QWEN
) -> Iterator[openai.OpenAI]:
    app = tiny_app(FakeEngine(script), template, max_model_len=4096)
    with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as api:
        yield api


def create(script: str, template: str = QWEN, **fields: Any) -> Any:
    with client(script, template) as api:
        return api.responses.create(model="tiny", **{"input": "Hello", **fields})


def stream(script: str, template: str = QWEN, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and the response at their end; of a complete one the client's own."""
    options = {"input": "Hello", **fields}
    with client(script, template) as api, api.responses.stream(model="tiny", **options) as events:
        found = list(events)
        is_complete = found[-1].type == "response.completed"
        return found, events.get_final_response() if is_complete else found[-1].response


def output(value: Any) -> Any:
    """Output items without what the client or chance adds: ids, and fields with a parsed copy."""
    if isinstance(value, list):
        return [output(item) for item in value]
    if isinstance(value, dict):
        names = ("id", "call_id", "parsed", "parsed_arguments")
        return {name: output(item) for name, item in value.items() if name not in names and item is not None}
    return output(value.model_dump()) if hasattr(value, "model_dump") else value


@pytest.mark.parametrize(
    ("script", "template", "fields", "kinds", "status"),
    [
        (TEXT, QWEN, {}, ["message"], "completed"),
        (TEXT, QWEN, {"top_logprobs": 2}, ["message"], "completed"),
        ("", QWEN, {}, [], "completed"),
        (TEXT, QWEN, {"max_output_tokens": 5}, ["message"], "incomplete"),
        (f"Ok.\n{CALL}\n{CALL}", QWEN, {"tools": [TOOL]}, ["message", *["function_call"] * 2], "completed"),
        (f"<think>\nHm.\n</think>\n\n{CALL}", QWEN3, {"tools": [TOOL]}, ["reasoning", "function_call"], "completed"),
    ],
)  # fmt: skip
def test_stream_and_whole_answer_are_the_same_response(
    script: str, template: str, fields: dict[str, Any], kinds: list[str], status: str
) -> None:
    whole = create(script, template, **fields)
    events, streamed = stream(script, template, **fields)
    assert [item.type for item in whole.output] == kinds
    assert (whole.status, streamed.status) == (status, status)
    assert output(whole.output) == output(streamed.output)
    assert whole.usage == streamed.usage and whole.usage.output_tokens > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}"


def test_response_repeats_the_request() -> None:
    response = create(TEXT, instructions="Be brief.", temperature=0.5, tools=[TOOL], metadata={"a": "b"})
    assert response.output_text == TEXT and response.id.startswith("resp_")
    assert (response.instructions, response.temperature, response.store) == ("Be brief.", 0.5, False)
    assert (response.tools[0].name, response.tool_choice, response.metadata) == (
        "get_weather",
        "auto",
        {"a": "b"},
    )
    assert response.incomplete_details is None and response.error is None


def test_every_event_has_its_place() -> None:
    events, _ = stream(f"I look.\n{CALL}", tools=[TOOL])
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        "completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == {"city": "Oslo"}
    assert {event.output_index for event in events if hasattr(event, "output_index")} == {0, 1}


def test_cut_answer_says_why() -> None:
    response = create(TEXT, max_output_tokens=5)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


def test_failure_inside_a_stream_is_an_event() -> None:
    engine = FakeEngine()
    engine.fail_after = 3
    text = post(tiny_app(engine), RESPONSES, {"input": "Hello", "stream": True}).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed" and body["response"]["status"] == "failed"
    assert body["response"]["error"]["code"] == "internal_error" and "secret" not in text


def test_wrong_request_is_the_client_s_own_error() -> None:
    with client() as api, pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="tiny", input="Hello", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("template", [QWEN, QWEN3])
def test_tool_loop_ends(streamed: bool, template: str) -> None:
    def script(request: EngineRequest) -> str:
        return "It rains." if "rain in Oslo" in prompt_of(request) else f"I look.\n{CALL}"

    with client(script, template) as api:
        items: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
        for _ in range(3):
            options: Any = {"model": "tiny", "input": items, "tools": [TOOL], "store": False}
            if streamed:
                with api.responses.stream(**options) as events:
                    response = events.get_final_response()
            else:
                response = api.responses.create(**options)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            items += [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
            ]
            for made in calls:
                city = json.loads(made.arguments)["city"]
                items.append(
                    {"type": "function_call_output", "call_id": made.call_id, "output": f"rain in {city}"}
                )
        assert response.output_text == "It rains." and len(items) == 4

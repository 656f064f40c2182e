"""OpenAI's own SDK: ``parse``, streaming helpers and tool loops, on chat completions and on responses."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.weather import ASKED, FUNCTION, QUESTION, TOOL, Weather

DESCRIBE: dict[str, Any] = {"role": "user", "content": "Describe Oslo."}


class City(BaseModel):
    name: str
    country: str
    size: Literal["small", "large"]


class Place(BaseModel):
    name: Literal["Oslo", "Bergen"]
    size: Literal["small", "large"]


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.base, api_key="any", max_retries=0)


@pytest.fixture
def real_client(real: Server) -> OpenAI:
    return OpenAI(base_url=real.base, api_key="any", max_retries=0)


def test_parse_gives_an_object(real: Server, real_client: OpenAI) -> None:
    answer = real_client.chat.completions.parse(
        model=real.model, messages=[DESCRIBE], response_format=City, temperature=1.0, seed=1, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_parse_gives_the_arguments_of_calls(real: Server, real_client: OpenAI) -> None:
    answer = real_client.chat.completions.parse(
        model=real.model,
        messages=[ASKED],
        tools=[openai.pydantic_function_tool(Place)],
        tool_choice="required",
        temperature=0,
        max_tokens=300,
    )
    for call in answer.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, Place)
    assert answer.choices[0].message.tool_calls


def test_the_streaming_helper_ends_with_what_parse_gives(real: Server, real_client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": real.model, "messages": [DESCRIBE], "temperature": 0, "max_tokens": 300}
    whole = real_client.chat.completions.parse(**asked, response_format=City)
    with real_client.chat.completions.stream(**asked, response_format=City) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert isinstance(last.choices[0].message.parsed, City)
    assert last.choices[0].message.parsed == whole.choices[0].message.parsed


def test_the_streaming_helper_counts_tokens_and_logprobs(real: Server, real_client: OpenAI) -> None:
    with real_client.chat.completions.stream(
        model=real.model,
        messages=[DESCRIBE],
        temperature=0,
        max_tokens=200,
        stop=["Oslo"],
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        tokens = [event.content for event in events if event.type == "logprobs.content.delta"]
        last = stream.get_final_completion()
    assert last.choices[0].finish_reason == "stop"
    assert last.usage is not None and last.usage.completion_tokens > 0
    assert 0 < sum(map(len, tokens)) <= last.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_chat_loop(server: Server, client: OpenAI, weather: Weather, stream: bool) -> None:
    asked: list[Any] = [ASKED]
    first = turn(client, stream, asked, model=server.model, tools=[TOOL], tool_choice=server.choice)
    [call] = first.tool_calls
    result = weather.tool(**json.loads(call.function.arguments))
    asked += [first.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    server.check(weather, turn(client, stream, asked, model=server.model, tools=[TOOL]).content)


def turn(client: OpenAI, stream: bool, messages: list[Any], **options: Any) -> Any:
    """The message of one answer; with ``stream``, put together by the helper."""
    options |= {"messages": messages, "temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
    if not stream:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as events:
        for event in events:
            if event.type == "tool_calls.function.arguments.done":
                json.loads(event.arguments)
        return events.get_final_completion().choices[0].message


@pytest.mark.parametrize("stream", [False, True])
def test_responses_loop(server: Server, client: OpenAI, weather: Weather, stream: bool) -> None:
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    asked: list[Any] = [ASKED]
    options: dict[str, Any] = {
        "model": server.model,
        "tools": tools,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    options |= {"parallel_tool_calls": False, "store": False}
    first = respond(client, stream, input=asked, tool_choice=server.choice, **options)
    asked += first.output
    for call in first.output:
        if call.type == "function_call":
            result = weather.tool(**json.loads(call.arguments))
            asked.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    server.check(weather, respond(client, stream, input=asked, **options).output_text)


def respond(client: OpenAI, stream: bool, **options: Any) -> Any:
    if not stream:
        return client.responses.create(**options)
    with client.responses.stream(**options) as events:
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        return events.get_final_response()


def test_responses_parse(real: Server, real_client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": real.model, "input": "Describe Oslo.", "temperature": 0}
    whole = real_client.responses.parse(**asked, text_format=City, max_output_tokens=300)
    assert isinstance(whole.output_parsed, City)
    with real_client.responses.stream(**asked, text_format=City, max_output_tokens=300) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == whole.output_parsed
    assert City.model_validate_json(text) == whole.output_parsed


def test_raw_streams_end_with_the_text_of_whole_answers(real: Server, real_client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": real.model, "messages": [ASKED], "temperature": 0, "max_tokens": 40}
    whole = real_client.chat.completions.create(**asked).choices[0].message.content
    chunks = real_client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    prompted: dict[str, Any] = {"model": real.model, "prompt": QUESTION, "temperature": 0, "max_tokens": 40}
    text = real_client.completions.create(**prompted).choices[0].text
    assert (
        "".join(part.choices[0].text for part in real_client.completions.create(**prompted, stream=True))
        == text
    )

"""langchain-openai, on chat completions and on responses."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.weather import QUESTION, Weather


class City(BaseModel):
    """A city."""

    name: str
    country: str


def model_of(server: Server, responses: bool = False, **options: Any) -> Any:
    return ChatOpenAI(
        model=server.model,
        base_url=server.base,
        api_key="any",
        temperature=0,
        max_retries=0,
        max_tokens=options.pop("max_tokens", 200),
        use_responses_api=responses,
        **options,
    )


def test_stream_equals_the_whole_answer(real: Server) -> None:
    model = model_of(real, max_tokens=30, stream_usage=True)
    answer = model.invoke("Hello")
    chunks = list(model.stream("Hello"))
    assert answer.content and "".join(chunk.content for chunk in chunks) == answer.content
    used = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
    assert used == answer.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_loop(server: Server, weather: Weather, responses: bool, stream: bool) -> None:
    model = model_of(server, responses)
    asked: list[Any] = [HumanMessage(QUESTION)]
    calling = model.bind_tools([weather.tool], tool_choice=server.choice, parallel_tool_calls=False)
    first = turn(calling, asked, stream)
    [call] = first.tool_calls
    assert call["name"] == "get_weather"
    asked += [first, ToolMessage(weather.tool(**call["args"]), tool_call_id=call["id"])]
    server.check(weather, turn(model.bind_tools([weather.tool]), asked, stream).text)


def turn(model: Any, messages: list[Any], stream: bool) -> Any:
    """One answer; with ``stream``, the sum of its chunks."""
    if not stream:
        return model.invoke(messages)
    first, *rest = model.stream(messages)
    for chunk in rest:
        first = first + chunk
    return first


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(real: Server, method: str) -> None:
    found = model_of(real).with_structured_output(City, method=method).invoke("Describe Oslo.")
    assert isinstance(found, City)

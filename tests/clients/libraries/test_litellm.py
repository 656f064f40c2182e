"""litellm, as a client of vLLM's and of OpenAI's kind."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import Server
from tests.clients.weather import ASKED, TOOL, Weather

PROVIDERS = ["hosted_vllm", "openai"]


def options_of(server: Server, provider: str, **more: Any) -> dict[str, Any]:
    name = f"{provider}/{server.model}"
    return {"model": name, "api_base": server.base, "api_key": "any", "temperature": 0, **more}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stream_equals_the_whole_answer(real: Server, provider: str) -> None:
    options = options_of(real, provider, messages=[ASKED], max_tokens=30)
    answer = litellm.completion(**options, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert text and len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    stream = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_loop(server: Server, weather: Weather, provider: str, stream: bool) -> None:
    asked: list[Any] = [ASKED]
    options = options_of(server, provider, tools=[TOOL], max_tokens=200)
    first = turn(stream, asked, tool_choice=server.choice, **options)
    asked.append(first.model_dump())
    for call in first.tool_calls:
        result = weather.tool(**json.loads(call.function.arguments))
        asked.append({"role": "tool", "tool_call_id": call.id, "content": result})
    server.check(weather, turn(stream, asked, **options).content)


def turn(stream: bool, messages: list[Any], **options: Any) -> Any:
    """The message of one answer; with ``stream``, put together by litellm."""
    answer = litellm.completion(messages=messages, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message

"""Anthropic's own SDK on ``/v1/messages``: whole answers, the streaming helper, and its tool runner."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

from tests.clients.conftest import Server
from tests.clients.weather import ASKED, FUNCTION, Weather

TOOL: dict[str, Any] = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


@pytest.fixture
def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="any", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_loop(server: Server, client: Anthropic, weather: Weather, stream: bool) -> None:
    choice = "any" if server.is_real else "auto"
    asked: list[Any] = [ASKED]
    first = turn(client, stream, server.model, asked, {"type": choice, "disable_parallel_tool_use": True})
    assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather.tool(**block.input)}
        for block in first.content
        if block.type == "tool_use"
    ]
    asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = turn(client, stream, server.model, asked, {"type": "auto"})
    assert last.stop_reason in ("end_turn", "max_tokens") and last.usage.output_tokens > 0
    server.check(weather, "".join(block.text for block in last.content if block.type == "text"))


def turn(client: Anthropic, stream: bool, model: str, messages: list[Any], choice: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"model": model, "messages": messages, "tools": [TOOL], "tool_choice": choice}
    options |= {"max_tokens": 200, "extra_body": {"temperature": 0}}
    if not stream:
        return client.messages.create(**options)
    with client.messages.stream(**options) as events:
        text = "".join(event.text for event in events if event.type == "text")
        message = events.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


def test_tool_runner(scripted: Server, weather: Weather) -> None:
    client = Anthropic(base_url=scripted.url, api_key="any", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=scripted.model, max_tokens=200, messages=[ASKED], tools=[beta_tool(weather.tool)]
    )
    last = runner.until_done()
    scripted.check(weather, "".join(block.text for block in last.content if block.type == "text"))


def test_count_tokens(server: Server, client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=server.model, messages=[ASKED], tools=[TOOL])
    answer = client.messages.create(model=server.model, messages=[ASKED], tools=[TOOL], max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

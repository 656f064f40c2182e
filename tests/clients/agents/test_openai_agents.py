"""openai-agents."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import pytest
from openai import AsyncOpenAI

from tests.clients.conftest import Server
from tests.clients.weather import QUESTION, Weather

agents.set_tracing_disabled(True)


@pytest.fixture(params=["chat", "responses"])
def agent(request: pytest.FixtureRequest, server: Server, weather: Weather) -> Any:
    """An agent; after the first call its choice of tools is free again."""
    client = AsyncOpenAI(base_url=server.base, api_key="any", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(
        tool_choice=server.choice, temperature=0, max_tokens=200, parallel_tool_calls=False
    )
    return agents.Agent(
        name="forecaster",
        instructions="Be brief.",
        model=kind(server.model, client),
        model_settings=settings,
        tools=[agents.function_tool(weather.tool)],
    )


def test_loop(server: Server, agent: Any, weather: Weather) -> None:
    server.check(weather, asyncio.run(agents.Runner.run(agent, QUESTION)).final_output)


def test_streamed_loop(server: Server, agent: Any, weather: Weather) -> None:
    async def run() -> Any:
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    server.check(weather, asyncio.run(run()))

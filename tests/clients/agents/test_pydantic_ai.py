"""pydantic-ai, on the three APIs that it speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunResultEvent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.conftest import Server
from tests.clients.weather import QUESTION, Weather


class Forecast(BaseModel):
    city: str
    rain: bool


class CallFirst(AbstractCapability[Any]):
    """The first step calls a tool where the server's model needs to be told."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice

    def get_model_settings(self) -> Any:
        def settings(context: RunContext[Any]) -> ModelSettings:
            return ModelSettings(tool_choice=self.choice if context.run_step == 1 else "auto")

        return settings


def model_of(api: str, server: Server) -> Any:
    if api == "anthropic":
        return AnthropicModel(server.model, provider=AnthropicProvider(base_url=server.url, api_key="any"))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(server.model, provider=OpenAIProvider(base_url=server.base, api_key="any"))


@pytest.fixture(params=["chat", "responses", "anthropic"])
def agent(request: pytest.FixtureRequest, server: Server, weather: Weather) -> Any:
    settings = ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False)
    capability = CallFirst(server.choice)
    model = model_of(request.param, server)
    return Agent(model, tools=[weather.tool], model_settings=settings, capabilities=[capability])


def test_loop(server: Server, agent: Any, weather: Weather) -> None:
    server.check(weather, asyncio.run(agent.run(QUESTION)).output)


def test_streamed_loop(server: Server, agent: Any, weather: Weather) -> None:
    async def run() -> Any:
        async with agent.run_stream_events(QUESTION) as events:
            found = [event async for event in events]
        [last] = [event for event in found if isinstance(event, AgentRunResultEvent)]
        return last.result.output

    server.check(weather, asyncio.run(run()))


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_typed_output(real: Server, api: str, kind: Any) -> None:
    agent = Agent(
        model_of(api, real),
        output_type=kind(Forecast),
        model_settings=ModelSettings(temperature=0, max_tokens=300),
    )
    assert isinstance(asyncio.run(agent.run(QUESTION)).output, Forecast)

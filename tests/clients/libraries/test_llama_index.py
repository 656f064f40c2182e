"""llama-index: its agent, with whole answers and with streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import Server
from tests.clients.weather import QUESTION, Weather


def model_of(server: Server) -> Any:
    return OpenAILike(
        model=server.model,
        api_base=server.base,
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_loop(server: Server, weather: Weather, stream: bool) -> None:
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(weather.tool)],
        llm=model_of(server),
        streaming=stream,
        initial_tool_choice=server.choice,
        allow_parallel_tool_calls=False,
    )

    async def run() -> str:
        return str(await agent.run(QUESTION))

    server.check(weather, asyncio.run(run()))


def test_completion_and_stream(real: Server) -> None:
    model = model_of(real)
    text = model.complete(QUESTION).text
    assert text and [part.text for part in model.stream_complete(QUESTION)][-1] == text

"""Tool loops of clients nobody changed for us, each to its end; ``pip install -e '.[clients]'`` brings them.

The model is a script: a call to ``get_weather`` as long as the conversation has no weather, and then a sentence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from optkit.runtime.types import EngineRequest
from tests.support.chat_templates import QWEN
from tests.support.serve_fakes import FakeEngine, prompt_of, served, tiny_app

REASON = "pip install -e '.[clients]'"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QUESTION, ANSWER = "Weather in Oslo?", "It rains."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def script(request: EngineRequest) -> str:
    return ANSWER if "rain in Oslo" in prompt_of(request) else f"I look.\n{CALL}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(tiny_app(FakeEngine(script), QWEN, max_model_len=16_384)) as address:
        yield address


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=REASON)
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="any").bind_tools([get_weather])
    asked = [messages.HumanMessage(QUESTION)]
    first = model.invoke(asked)
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    streamed = None
    for chunk in model.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    assert [c["args"] for c in streamed.tool_calls] == [{"city": "Oslo"}]
    result = messages.ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert model.invoke([*asked, first, result]).content == ANSWER


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    options = {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "tools": [TOOL]}
    message = litellm.completion(**options, messages=asked).choices[0].message
    [call] = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": get_weather(**json.loads(call.function.arguments)),
    }
    answer = litellm.completion(**options, messages=[*asked, message.model_dump(), result])
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai(url: str, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=REASON)
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        model: Any = AnthropicModel("tiny", provider=AnthropicProvider(base_url=url, api_key="any"))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
    agent = pydantic_ai.Agent(model, tools=[get_weather])
    assert agent.run_sync(QUESTION).output == ANSWER

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(streamed()) in (ANSWER, "I look.")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    agents = pytest.importorskip("agents", reason=REASON)
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    tool = agents.function_tool(get_weather)
    agent = agents.Agent(name="a", instructions="Be brief.", model=kind("tiny", client), tools=[tool])
    assert agents.Runner.run_sync(agent, QUESTION).final_output == ANSWER

    async def streamed() -> Any:
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(streamed()) == ANSWER


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor", reason=REASON)
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        """get_weather"""

        city: str

    Weather.__name__ = "get_weather"
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="any"), mode=instructor.Mode.TOOLS
    )
    asked = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(model="tiny", messages=asked, response_model=Weather)
    assert found.city == "Oslo"


def test_llama_index(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like", reason=REASON)
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    tools = pytest.importorskip("llama_index.core.tools")
    model = like.OpenAILike(
        model="tiny", api_base=f"{url}/v1", api_key="any", is_chat_model=True, is_function_calling_model=True
    )
    agent = workflow.FunctionAgent(tools=[tools.FunctionTool.from_defaults(get_weather)], llm=model)

    async def loop() -> str:
        return str(await agent.run(QUESTION))

    assert asyncio.run(loop()) == ANSWER


def test_llm(url: str) -> None:
    """Simon Willison's ``llm``."""
    models = pytest.importorskip("llm.default_plugins.openai_models", reason=REASON)
    model = models.Chat("tiny", model_name="tiny", api_base=f"{url}/v1", supports_tools=True)
    model.key = "any"
    for stream in (False, True):
        chain = model.chain(QUESTION, tools=[get_weather], stream=stream)
        assert chain.text().endswith(ANSWER)

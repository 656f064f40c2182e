"""Simon Willison's ``llm``. It has no option for ``tool_choice``: the loop is on the scripted model alone."""

from __future__ import annotations

from typing import Any

import pytest
from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel

from tests.clients.conftest import Server
from tests.clients.weather import QUESTION, Weather


class Forecast(BaseModel):
    city: str
    rain: bool


def model_of(server: Server) -> Any:
    model = Chat(
        server.model,
        model_name=server.model,
        api_base=server.base,
        supports_tools=True,
        supports_schema=True,
    )
    model.key = "any"
    return model


@pytest.mark.parametrize("stream", [False, True])
def test_loop(scripted: Server, weather: Weather, stream: bool) -> None:
    chain = model_of(scripted).chain(QUESTION, tools=[weather.tool], stream=stream)
    text = chain.text()
    assert text.startswith("I look.")
    scripted.check(weather, text.removeprefix("I look.").strip())


def test_conversation(real: Server) -> None:
    conversation = model_of(real).conversation()
    asked = ("My name is Ada. Say hello.", "What is my name?")
    used = []
    for text in asked:
        answer = conversation.prompt(text, temperature=0, max_tokens=40)
        assert answer.text().strip()
        used.append(answer.usage().input)
    assert used[1] > used[0] + 10  # the first turn is sent again


@pytest.mark.parametrize("stream", [False, True])
def test_schema(real: Server, stream: bool) -> None:
    answer = model_of(real).prompt(QUESTION, schema=Forecast, stream=stream, temperature=0, max_tokens=300)
    assert isinstance(Forecast.model_validate_json(answer.text()), Forecast)

"""instructor: objects out of calls and of constrained text, and asking again with what was wrong."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, field_validator

from tests.clients.conftest import Server
from tests.clients.weather import ASKED

Mode = instructor.Mode


class City(BaseModel):
    """A city."""

    name: str
    country: str


def client_of(server: Server, mode: Any) -> Any:
    return instructor.from_openai(OpenAI(base_url=server.base, api_key="any", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_objects(real: Server, mode: Any) -> None:
    options: dict[str, Any] = {"model": real.model, "messages": [ASKED], "temperature": 0, "max_tokens": 300}
    found = client_of(real, mode).chat.completions.create(**options, response_model=City, max_retries=0)
    assert isinstance(found, City)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.RESPONSES_TOOLS])
def test_a_refused_call_goes_back_as_a_result_and_the_model_calls_again(real: Server, mode: Any) -> None:
    refused: list[str] = []

    class Place(City):
        """A place."""

        @field_validator("name")
        @classmethod
        def once(cls, name: str) -> str:
            if not refused:
                refused.append(name)
                raise ValueError("the name has to be in capital letters")
            return name

    limit = {"max_output_tokens": 300} if mode == Mode.RESPONSES_TOOLS else {"max_tokens": 300}
    found = client_of(real, mode).chat.completions.create(
        model=real.model, messages=[ASKED], response_model=Place, temperature=0, max_retries=2, **limit
    )
    assert isinstance(found, Place) and len(refused) == 1


def test_partial_objects_stream(real: Server) -> None:
    parts = list(
        client_of(real, Mode.TOOLS).chat.completions.create_partial(
            model=real.model, messages=[ASKED], response_model=City, temperature=0, max_tokens=300
        )
    )
    assert len(parts) > 1 and parts[-1].name is not None and parts[-1].country is not None

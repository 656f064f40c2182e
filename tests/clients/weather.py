"""The tool of all loops, and the conversation around it."""

from __future__ import annotations

from typing import Any

QUESTION, ANSWER = "What is the weather in Oslo?", "It rains."
RESULT = "rain in"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city."}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": FUNCTION}
ASKED: dict[str, Any] = {"role": "user", "content": QUESTION}


class Weather:
    """``get_weather``, and the cities of its calls."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    @property
    def tool(self) -> Any:
        """A plain function with a signature and a docstring, from which clients make their descriptions."""

        def get_weather(city: str) -> str:
            """The weather in a city."""
            self.cities.append(city)
            return f"{RESULT} {city}"

        return get_weather


def script(prompt: str) -> str:
    """Answer with a call until the conversation has the weather, and then with a sentence."""
    return ANSWER if f"{RESULT} Oslo" in prompt else f"I look.\n{CALL}"

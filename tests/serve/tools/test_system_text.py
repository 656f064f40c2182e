"""Tools in words: every template can show them, and what the prompt says is what the parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optkit.serve.tools.formats import FORMATS, choose_format
from optkit.serve.tools.parser import CallFormat, ToolCallParser
from optkit.serve.tools.parts import calls_of
from optkit.serve.tools.system_text import call_text, in_words
from optkit.serve.tools.use import Tool, ToolUse
from optkit.text.chat_template import ChatTemplate
from optkit.text.template_traits import find_traits
from tests.support import chat_templates

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = (Tool("get_weather", "The weather in a city.", SCHEMA), Tool("now"))
CALLS = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [*CALLS, *CALLS]},
    {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "rain"},
    {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "snow"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("source", [chat_templates.CHATML, chat_templates.GEMMA])
def test_template_without_tools_renders_a_conversation_with_tools(source: str) -> None:
    template = ChatTemplate(source)
    chat = choose_format(find_traits(template))
    text = template.render(in_words(CONVERSATION, chat.calls, ToolUse(TOOLS, TOOLS), chat.takes_system))
    for word in (
        "The weather in a city.",
        '{"name": "now"}',
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    ):
        assert word in text
    assert text.index("You can call") < text.index("Weather?") < text.index("rain") < text.index("snow")
    assert text.index("snow") < text.index("And now?")


def test_messages_given_are_not_changed() -> None:
    before = json.dumps(CONVERSATION)
    in_words(CONVERSATION, FORMATS["json"], ToolUse(TOOLS, TOOLS), takes_system=False)
    assert json.dumps(CONVERSATION) == before


def test_description_goes_behind_the_text_of_a_system_message() -> None:
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first, second = in_words(told, FORMATS["json"], ToolUse(TOOLS, TOOLS), takes_system=True)
    assert first["content"].startswith("Be brief.\n\nYou can call") and second == told[1]


def test_conversation_without_tools_is_unchanged() -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert in_words(plain, FORMATS["json"], None, takes_system=True) == plain


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_call_as_described_is_read_as_a_call(form: CallFormat) -> None:
    parser = ToolCallParser(form, ["f"])
    parts = parser.push(call_text(form, "f", '{"a": 1}')) + parser.finish()
    assert [(call.name, call.arguments) for call in calls_of(parts)] == [("f", '{"a": 1}')]

"""The traits of a chat template, found by rendering: does it take tools, and in which form does it write calls?

The history of a conversation shows the model's own form of a call, so a rendered call tells the form without knowledge
of the template's text. Words that no template has stand in the places of names and contents.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from optkit.text.chat_template import ChatTemplate, TemplateFailure

WORD, TOOL, ARGUMENT = "qXcontentXq", "qXtoolXq", "qXargumentXq"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": TOOL, "arguments": {ARGUMENT: "x"}}}
    ],
}


class TemplateTraits(msgspec.Struct, frozen=True):
    """Facts about a chat template.

    Attributes:
        takes_tools: the prompt shows the tools.
        takes_system: the prompt shows a system message.
        thinks: the template knows the tags of reasoning, ``<think>`` and ``</think>``.
        call_open: text between the begin of the assistant's message and the JSON object of a call.
        call_keys: keys of the object; empty if the template writes no calls, or none in such an object.
    """

    takes_tools: bool = False
    takes_system: bool = True
    thinks: bool = False
    call_open: str = ""
    call_keys: tuple[str, ...] = ()


def find_traits(template: ChatTemplate) -> TemplateTraits:
    """Render ``template`` a few times; a refusal counts as a missing trait."""
    call_open, call_keys = _call(template)
    return TemplateTraits(
        takes_tools=TOOL in (_rendered(template, [USER]) or ""),
        takes_system=WORD in (_rendered(template, [{"role": "system", "content": WORD}, USER]) or ""),
        thinks="</think>" in template.source,
        call_open=call_open,
        call_keys=call_keys,
    )


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str | None:
    """The prompt with a tool and without the beginning of an answer; None if the template refuses."""
    try:
        return template.render(messages, tools=TOOLS, add_generation_prompt=False)
    except TemplateFailure:
        return None


def _call(template: ChatTemplate) -> tuple[str, tuple[str, ...]]:
    """``call_open`` and ``call_keys``."""
    answer = _rendered(template, [USER, {"role": "assistant", "content": WORD}]) or ""
    start = answer.find(WORD)
    text = (_rendered(template, [USER, CALL]) or "")[max(start, 0) :]
    brace = text.find("{")
    if start < 0 or brace < 0:
        return "", ()
    try:
        found, _ = json.JSONDecoder().raw_decode(text[brace:])
    except ValueError:
        return "", ()
    return (text[:brace], tuple(found)) if found.get("name") == TOOL else ("", ())

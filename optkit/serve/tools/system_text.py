"""Tools in words, for chat templates without tools, or with calls in a form without a parser.

The system message describes the tools and the form of a call. Calls and results of the conversation so far become text
of assistant and user messages, because these templates know neither ``tool_calls`` nor the role ``tool``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from optkit.serve.tools.parser import CallFormat
from optkit.serve.tools.use import Tool, ToolUse

Message = dict[str, Any]

INTRODUCTION = (
    "You can call these tools; each line has a name, a description and the JSON Schema of the arguments:"
)
HOW = "To call a tool, answer with the call and nothing else, in this form:"
SEVERAL = "To call several tools, write one call after the other."
OTHERWISE = "When no tool is needed, or the results are there, answer in plain text."
MUST = "Answer with a tool call."


def describe(form: CallFormat, use: ToolUse) -> str:
    """The description of the tools and of the form of calls, for the model."""
    lines = [INTRODUCTION, *map(_line, use.shown), "", HOW]
    lines.append(call_text(form, "NAME", '{"ARGUMENT": "VALUE"}'))
    if use.parallel:
        lines.append(SEVERAL)
    lines.append(MUST if use.required else OTHERWISE)
    return "\n".join(lines)


def _line(tool: Tool) -> str:
    return json.dumps(tool.definition["function"], ensure_ascii=False)


def call_text(form: CallFormat, name: str, arguments: str) -> str:
    """A call in the model's text; ``arguments`` are JSON."""
    text = f'{{"name": {json.dumps(name)}, "{form.arguments}": {arguments}}}'
    return f"{form.open}\n{text}\n{form.close}" if form.open else text


def in_words(
    messages: Sequence[Message], form: CallFormat, use: ToolUse | None, takes_system: bool
) -> list[Message]:
    """``messages`` with tools, calls and results as text.

    Args:
        use: None for a request without tools; calls and results of the conversation are text all the same.
        takes_system: False puts the description into the first user message.
    """
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            _add_to_user(found, f"<tool_response>\n{message['content']}\n</tool_response>")
        elif message["role"] == "user" and found and found[-1].get("has_results"):
            _add_to_user(found, message["content"])
        else:
            found.append(_with_calls(message, form))
    for message in found:
        message.pop("has_results", None)
    return _with_description(found, describe(form, use), takes_system) if use else found


def _add_to_user(messages: list[Message], text: str) -> None:
    """Add to the user message behind a call: roles still alternate."""
    if messages and messages[-1].get("has_results"):
        messages[-1]["content"] += f"\n{text}"
    else:
        messages.append({"role": "user", "content": text, "has_results": True})


def _with_calls(message: Message, form: CallFormat) -> Message:
    message = dict(message)
    calls = message.pop("tool_calls", [])
    texts = [
        call_text(form, call["function"]["name"], _json(call["function"]["arguments"])) for call in calls
    ]
    message["content"] = "\n".join(text for text in (message["content"], *texts) if text)
    return message


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_description(messages: list[Message], text: str, takes_system: bool) -> list[Message]:
    role = "system" if takes_system else "user"
    at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if at is None or (role == "system" and at > 0):
        return [{"role": role, "content": text}, *messages]
    told = messages[at] | {"content": f"{messages[at]['content']}\n\n{text}".lstrip()}
    if role == "user":
        told["content"] = f"{text}\n\n{messages[at]['content']}"
    return [*messages[:at], told, *messages[at + 1 :]]

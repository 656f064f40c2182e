"""Input items of Responses requests as messages of a chat request.

An item is a message, a tool call, a call's result, or reasoning. Calls behind a message of the assistant belong to the
message, and reasoning belongs to the next message or call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Item = dict[str, Any]

TEXT_TYPES = frozenset(["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"])
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def messages_of(items: str | Sequence[Item]) -> list[Item]:
    """The messages of a chat request.

    Raises:
        ValueError: an item without a meaning here; the message begins with the place.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    reader = _Reader()
    for i, item in enumerate(items):
        try:
            reader.add(item)
        except ValueError as error:
            raise ValueError(f"'input.{i}': {error}") from None
    return reader.messages


class _Reader:
    """Messages so far, and the reasoning of the next message."""

    def __init__(self) -> None:
        self.messages: list[Item] = []
        self._reasoning: str | None = None
        self._adds = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._result,
            "reasoning": self._think,
        }

    def add(self, item: Item) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "item_reference":
            raise ValueError("answers are not stored; send the item itself")
        if not isinstance(kind, str) or kind not in self._adds:
            raise ValueError(f"items of type '{str(kind)[:40]}' are not supported")
        self._adds[kind](item)

    def _message(self, item: Item) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise ValueError("the role must be 'user', 'assistant', 'system' or 'developer'")
        message = {"role": ROLES[role], "content": text_of(item.get("content"))}
        self.messages.append(self._with_reasoning(message) if role == "assistant" else message)

    def _call(self, item: Item) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = self._with_reasoning({"role": "assistant", "content": ""})
            self.messages.append(last)
        function = {"name": string(item, "name"), "arguments": string(item, "arguments")}
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": string(item, "call_id"), "type": "function", "function": function})

    def _result(self, item: Item) -> None:
        content = text_of(item.get("output"))
        self.messages.append({"role": "tool", "tool_call_id": string(item, "call_id"), "content": content})

    def _think(self, item: Item) -> None:
        parts = item.get("content") or item.get("summary") or []
        self._reasoning = text_of(parts)

    def _with_reasoning(self, message: Item) -> Item:
        if self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, None
        return message


def string(item: Item, name: str) -> str:
    """A field with text.

    Raises:
        ValueError: another type, or the field is absent.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the text '{name}' is missing")
    return value


def text_of(content: Any) -> str:
    """Text of a string or of text parts, a line each.

    Raises:
        ValueError: other parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError("the content must be a string or a list of parts")
    for part in content:
        if part.get("type") not in TEXT_TYPES:
            raise ValueError(f"parts of type '{str(part.get('type'))[:40]}' are not supported")
    return "\n".join(string(part, "refusal" if part["type"] == "refusal" else "text") for part in content)

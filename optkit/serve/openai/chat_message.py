"""The message of a chat answer, whole and in pieces, with tool calls and reasoning."""

from __future__ import annotations

from typing import Any

from optkit.runtime.types import FinishReason
from optkit.serve.openai.generation import Delta
from optkit.serve.tools.parts import calls_of, text_of

TOOL_CALLS = "tool_calls"


def finish_reason(delta: Delta, names_tool: bool) -> str | None:
    """The reason in OpenAI's words.

    Args:
        names_tool: the request names the tool to call; the answer then ends with "stop", as at OpenAI.
    """
    if delta.finish_reason is FinishReason.STOP and delta.num_calls and not names_tool:
        return TOOL_CALLS
    return delta.finish_reason.value if delta.finish_reason else None


def message_delta(delta: Delta, is_first: bool) -> dict[str, object]:
    """The ``delta`` of a chunk, of a message with parts; an entry for each call in the chunk."""
    found: dict[str, object] = {"role": "assistant", "content": None} if is_first else {}
    if delta.text:
        found["content"] = delta.text
    if reasoning := text_of(delta.parts, "reasoning"):
        found["reasoning_content"] = reasoning
    calls: dict[int, dict[str, Any]] = {}
    for part in delta.parts:
        if part.kind == "call" and part.name:
            function = {"name": part.name, "arguments": part.text}
            begun = {"index": part.call, "id": part.call_id, "type": "function"}
            calls[part.call] = {**begun, "function": function}
        elif part.kind == "call":
            entry = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
    return found | ({TOOL_CALLS: list(calls.values())} if calls else {})


def whole_message(answer: Delta) -> dict[str, object]:
    """The message of a whole answer; ``content`` is null beside calls or reasoning alone."""
    calls, reasoning = calls_of(answer.parts), text_of(answer.parts, "reasoning")
    content = answer.text if answer.text or not (calls or reasoning) else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message[TOOL_CALLS] = [
            {
                "id": made.call_id,
                "type": "function",
                "function": {"name": made.name, "arguments": made.arguments},
            }
            for made in calls
        ]
    return message

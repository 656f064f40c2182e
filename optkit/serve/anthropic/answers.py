"""Answers of ``/v1/messages``: a message of content blocks, whole or as events.

A block begins where the kind of text changes: reasoning is ``thinking``, a call is ``tool_use``, all else ``text``.
As in OpenAI's streams no event is sent before the first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.types import FinishReason, FirstToken
from optkit.serve.anthropic.protocol import PARAMS
from optkit.serve.http.errors import ApiError
from optkit.serve.http.json_body import BadJson, object_in
from optkit.serve.openai.answers import (
    ResponseHead,
    ResponseParts,
    cached_tokens,
    forgotten_details,
    specprefill_details,
)
from optkit.serve.openai.generation import Delta, parts_of
from optkit.serve.tools.parts import Part, joined

INVALID_JSON = "INVALID_JSON"  # Anthropic's word around arguments that are no JSON object
DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True)
class MessagesEndpoint:
    """The words of ``/v1/messages``.

    Attributes:
        max_tokens: of the request.
    """

    max_tokens: int
    operation: str = "chat"
    prefix: str = "msg_"

    @property
    def params(self) -> Mapping[str, str]:
        return PARAMS

    def writer(self, head: ResponseHead, parts: ResponseParts) -> MessageWriter:
        return MessageWriter(head, parts, self.max_tokens)


class MessageWriter:
    """Writes the only choice of an answer."""

    def __init__(self, head: ResponseHead, parts: ResponseParts, max_tokens: int) -> None:
        self._head, self._num_prompt, self._max_tokens = head, parts.num_prompt, max_tokens
        self._blocks, self._open = 0, Part("content", "")  # blocks so far; the kind and call of the open one
        self._last: Delta | None = None
        self._first: FirstToken | None = None

    def chunk(self, delta: Delta) -> bytes:
        """The events for a delta."""
        events = b""
        if self._last is None:
            self._first = delta.first
            message = self._message([], None, delta) | {"stop_reason": None}
            events = event("message_start", message=message)
        self._last = delta
        for part in parts_of(delta):
            events += b"".join(self._part(part))
        return events

    def last(self) -> bytes:
        """The events at the end."""
        events, delta = self._close(), self._last
        if delta:
            reason = {"stop_reason": stop_reason(delta, self._max_tokens), "stop_sequence": delta.stop}
            usage = {"output_tokens": delta.num_tokens} | forgotten_details([delta.num_forgotten])
            events += event("message_delta", delta=reason, usage=usage)
        return events + event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The error as an event, which ends the stream."""
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"

    def whole(self, answers: list[Delta]) -> bytes:
        """The body of an answer without streaming."""
        [answer] = answers
        self._first = answer.first
        blocks = [block(part) for part in joined(parts_of(answer))]
        return msgspec.json.encode(self._message(blocks, stop_reason(answer, self._max_tokens), answer))

    def _message(self, blocks: list[Any], reason: str | None, delta: Delta) -> dict[str, Any]:
        cached = cached_tokens([self._first]) or 0
        usage = {
            "input_tokens": self._num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": delta.num_tokens,
            **specprefill_details([self._first]),
            **forgotten_details([delta.num_forgotten]),
        }
        return {
            "id": self._head.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": delta.stop if reason else None,
            "usage": usage,
        }

    def _part(self, part: Part) -> Iterator[bytes]:
        if self._blocks == 0 or (part.kind, part.call) != (self._open.kind, self._open.call):
            yield self._close()
            self._open, self._blocks = part, self._blocks + 1
            yield event(
                "content_block_start", index=self._blocks - 1, content_block=block(part._replace(text=""))
            )
        if part.text:
            kind, field = DELTAS[part.kind]
            yield event("content_block_delta", index=self._blocks - 1, delta={"type": kind, field: part.text})

    def _close(self) -> bytes:
        return event("content_block_stop", index=self._blocks - 1) if self._blocks else b""


def event(name: str, **fields: Any) -> bytes:
    """A server-sent event, with the name inside and outside."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def block(part: Part) -> dict[str, Any]:
    """A content block; a call without text has an empty input."""
    if part.kind == "content":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    name = part.call_id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": name, "name": part.name, "input": arguments(part.text)}


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; any text but a JSON object that every reader takes is wrapped in an object."""
    try:
        return object_in(text or "{}", repeats=True)
    except BadJson:
        return {INVALID_JSON: text}


def stop_reason(delta: Delta, max_tokens: int) -> str | None:
    """The reason in Anthropic's words; an answer shorter than ``max_tokens`` was cut by the end of the context."""
    if delta.finish_reason is FinishReason.STOP and delta.num_calls:
        return "tool_use"
    if delta.finish_reason is FinishReason.STOP:
        return "end_turn" if delta.stop is None else "stop_sequence"
    if delta.finish_reason is not FinishReason.LENGTH:
        return None
    return "max_tokens" if delta.num_tokens >= max_tokens else "model_context_window_exceeded"

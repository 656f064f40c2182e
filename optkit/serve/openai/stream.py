"""Server-sent events as OpenAI clients read them.

Rules, which make a client's TTFT and inter-token latency true:

- nothing is sent before the first token: ``role`` comes with the first content, not before;
- one chunk per token, as far as the text allows (half a character is no text);
- the last chunk of a choice has its ``finish_reason``; then, if requested, one usage chunk with ``choices: []``; then
  ``[DONE]``. With ``include_usage`` all earlier chunks have ``usage: null``, or the running count with
  ``continuous_usage_stats``;
- an error after the first byte is an event with the error body, and ``[DONE]`` still ends the stream.

The writer runs once per token per client, so a chunk is two constant byte strings around a JSON string, without a
model object or a dict in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.types import FinishReason, FirstToken
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.generation import Delta
from optkit.serve.openai.logprobs import LogprobFormat
from optkit.serve.tools.parts import calls_of, text_of

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


@dataclass(frozen=True)
class ResponseHead:
    """The values that all chunks of an answer share."""

    reply_id: str
    created: int
    model: str
    is_chat: bool


def usage(
    num_prompt: int,
    num_completion: int,
    firsts: Sequence[FirstToken | None] = (),
    n: int = 1,
    ttft_details: bool = False,
) -> dict[str, Any]:
    """OpenAI's ``usage`` object.

    Args:
        firsts: the engine's ``FirstToken`` of each choice; ``n`` choices share a prompt.
        ttft_details: add the parts of each choice's time to first token, in seconds.
    """
    body: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
    cached = [first.cached_tokens for first in firsts[::n] if first]
    if cached:
        body["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    if ttft_details:
        body["ttft_details"] = firsts
    return body


@dataclass(frozen=True)
class ResponseParts:
    """The parts of an answer beside the text.

    Attributes:
        prompts: the token ids of each prompt; the choices of a prompt follow each other.
        formats: writer of the logprobs of each choice; None without logprobs.
        show_ids: the answer has ``prompt_token_ids`` and ``token_ids``, in the places of vLLM's.
        ttft_details: the final usage has the parts of the time to first token.
        names_tool: the request names the tool to call; such an answer ends with "stop", as at OpenAI.
    """

    prompts: Sequence[Sequence[int]]
    formats: Sequence[LogprobFormat | None]
    show_ids: bool = False
    ttft_details: bool = False
    names_tool: bool = False

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return len(self.formats) // len(self.prompts)

    def prompt_of(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // self.n]

    def total_usage(self, num_completion: int, firsts: Sequence[FirstToken | None]) -> dict[str, Any]:
        """The usage of the whole answer; ``firsts`` as in ``usage``."""
        return usage(sum(map(len, self.prompts)), num_completion, firsts, self.n, self.ttft_details)


class ChunkWriter:
    """Writes the events of an answer.

    Args:
        head: id, model, kind.
        parts: the parts beside the text.
        include_usage: send the final usage chunk.
        continuous: also send the running usage in every chunk.
    """

    def __init__(
        self, head: ResponseHead, parts: ResponseParts, include_usage: bool = False, continuous: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if head.is_chat else "text_completion"
        shared = {"id": head.reply_id, "object": kind, "created": head.created, "model": head.model}
        self._begin = b"data: " + encode(shared)[:-1] + b',"choices":['
        self._is_chat, self._parts = head.is_chat, parts
        self._include_usage, self._continuous = include_usage, include_usage and continuous
        count = len(parts.formats)
        self._counts, self._started = [0] * count, [False] * count
        self._firsts: list[FirstToken | None] = [None] * count

    def chunk(self, delta: Delta) -> bytes:
        """The event for a delta."""
        self._counts[delta.choice] = delta.num_tokens
        self._firsts[delta.choice] = self._firsts[delta.choice] or delta.first
        finish = encode(finish_reason(delta, self._parts))
        in_choice, in_chunk = self._token_ids(delta) if self._parts.show_ids else (b"", b"")
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (
            delta.choice,
            self._text(delta),
            self._logprobs(delta),
            finish,
            in_choice,
        )
        self._started[delta.choice] = True
        return self._begin + choice + b"]" + in_chunk + self._running_usage(delta) + b"}\n\n"

    def last(self) -> bytes:
        """The usage event, if asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        total = encode(self._parts.total_usage(sum(self._counts), self._firsts))
        return self._begin + b'],"usage":' + total + b"}\n\n" + DONE

    def _text(self, delta: Delta) -> bytes:
        if delta.parts:
            return b'"delta":' + encode(message_delta(delta, not self._started[delta.choice]))
        text = encode(delta.text)
        if not self._is_chat:
            return b'"text":' + text
        if not self._started[delta.choice]:
            return b'"delta":{"role":"assistant","content":' + text + b"}"
        return b'"delta":{"content":' + text + b"}" if delta.text else b'"delta":{}'

    def _token_ids(self, delta: Delta) -> tuple[bytes, bytes]:
        """The ids for the choice, and for the chunk around it: a chat's first chunk has the ids of the prompt."""
        ids = b',"token_ids":' + encode(delta.token_ids)
        started = any(self._started) if self._is_chat else self._started[delta.choice]
        if started:
            return ids, b""
        prompt = b',"prompt_token_ids":' + encode(self._parts.prompt_of(delta.choice))
        return (ids, prompt) if self._is_chat else (ids + prompt, b"")

    def _logprobs(self, delta: Delta) -> bytes:
        written = self._parts.formats[delta.choice]
        return b"null" if written is None or not delta.logprobs else encode(written.write(delta.logprobs))

    def _running_usage(self, delta: Delta) -> bytes:
        if not self._include_usage:
            return b""
        if not self._continuous:
            return b',"usage":null'
        counts = len(self._parts.prompt_of(delta.choice)), delta.num_tokens
        return b',"usage":' + encode(usage(*counts, [self._firsts[delta.choice]]))


def finish_reason(delta: Delta, parts: ResponseParts) -> str | None:
    """The reason in OpenAI's words."""
    if delta.finish_reason is FinishReason.STOP and delta.num_calls and not parts.names_tool:
        return "tool_calls"
    return delta.finish_reason.value if delta.finish_reason else None


def message_delta(delta: Delta, is_first: bool) -> dict[str, object]:
    """The ``delta`` of a chunk of a message with tool calls or reasoning; an entry for each call in it."""
    found: dict[str, object] = {"role": "assistant", "content": None} if is_first else {}
    if delta.text:
        found["content"] = delta.text
    if reasoning := text_of(delta.parts, "reasoning"):
        found["reasoning_content"] = reasoning
    calls: dict[int, dict[str, Any]] = {}
    for part in delta.parts:
        if part.kind == "call" and part.name:
            function = {"name": part.name, "arguments": part.text}
            calls[part.call] = {
                "index": part.call,
                "id": part.call_id,
                "type": "function",
                "function": function,
            }
        elif part.kind == "call":
            entry = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
    return found | ({"tool_calls": list(calls.values())} if calls else {})


def whole_message(answer: Delta) -> dict[str, object]:
    """The message of a chat answer; ``content`` is null beside calls or reasoning alone."""
    calls, reasoning = calls_of(answer.parts), text_of(answer.parts, "reasoning")
    content = answer.text if answer.text or not (calls or reasoning) else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def error_event(error: ApiError) -> bytes:
    """The error body as an event, and the end of the stream."""
    return b"data: " + error.body() + b"\n\n" + DONE


def whole_response(head: ResponseHead, parts: ResponseParts, answers: list[Delta]) -> bytes:
    """The JSON body of an answer without streaming."""
    firsts = [answer.first for answer in answers]
    body: dict[str, object] = {
        "id": head.reply_id,
        "object": "chat.completion" if head.is_chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(head, parts, answer) for answer in answers],
        "usage": parts.total_usage(sum(answer.num_tokens for answer in answers), firsts),
    }
    if parts.show_ids and head.is_chat:
        body["prompt_token_ids"] = parts.prompt_of(0)
    return encode(body)


def _choice(head: ResponseHead, parts: ResponseParts, answer: Delta) -> dict[str, object]:
    reason = finish_reason(answer, parts)
    content: dict[str, object] = {"text": answer.text}
    if head.is_chat:
        content = {"message": whole_message(answer)}
    written = parts.formats[answer.choice]
    logprobs = written.write(answer.logprobs) if written else None
    choice = {"index": answer.choice, **content, "logprobs": logprobs, "finish_reason": reason}
    if parts.show_ids:
        choice["token_ids"] = answer.token_ids
        choice |= {} if head.is_chat else {"prompt_token_ids": parts.prompt_of(answer.choice)}
    return choice

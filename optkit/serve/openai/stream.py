"""Answers of the chat and completion endpoints: server-sent events as OpenAI clients read them, or a whole body.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.types import FirstToken
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.answers import ResponseHead, ResponseParts, usage
from optkit.serve.openai.best_of import best
from optkit.serve.openai.chat_message import finish_reason, message_delta, whole_message
from optkit.serve.openai.generation import Delta
from optkit.serve.openai.protocol import ChatRequest, GenerationRequest

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


@dataclass(frozen=True)
class OpenAIEndpoint:
    """The words of ``/v1/chat/completions`` or ``/v1/completions``."""

    request: GenerationRequest

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def params(self) -> Mapping[str, str]:
        return {}

    @property
    def operation(self) -> str:
        return "chat" if self.is_chat else "text_completion"

    @property
    def prefix(self) -> str:
        return "chatcmpl-" if self.is_chat else "cmpl-"

    def writer(self, head: ResponseHead, parts: ResponseParts) -> ChunkWriter:
        options = self.request.stream_options
        shows, continuous = (
            (options.include_usage, options.continuous_usage_stats) if options else (False, False)
        )
        return ChunkWriter(head, parts, self.is_chat, shows, continuous)


class ChunkWriter:
    """Writes an answer.

    Args:
        head: id, model, kind.
        parts: the parts beside the text.
        is_chat: a message, or else a text.
        include_usage: send the final usage chunk.
        continuous: also send the running usage in every chunk.
    """

    def __init__(
        self,
        head: ResponseHead,
        parts: ResponseParts,
        is_chat: bool,
        include_usage: bool = False,
        continuous: bool = False,
    ) -> None:
        self._kind = "chat.completion" if is_chat else "text_completion"
        self._head, self._parts, self._is_chat = head, parts, is_chat
        shared = self._shared(f"{self._kind}.chunk" if is_chat else self._kind)
        self._begin = b"data: " + encode(shared)[:-1] + b',"choices":['
        self._include_usage, self._continuous = include_usage, include_usage and continuous
        count = len(parts.formats)
        self._counts, self._started = [0] * count, [False] * count
        self._reasoning = [0] * count
        self._firsts: list[FirstToken | None] = [None] * count
        self._forgotten: list[int | None] = [None] * count

    def _shared(self, kind: str) -> dict[str, Any]:
        head = self._head
        shared = {"id": head.reply_id, "object": kind, "created": head.created, "model": head.model}
        return shared | ({"system_fingerprint": head.fingerprint} if head.fingerprint else {})

    def chunk(self, delta: Delta) -> bytes:
        """The event for a delta."""
        self._counts[delta.choice] = delta.num_tokens
        self._reasoning[delta.choice] = delta.num_reasoning
        self._forgotten[delta.choice] = delta.num_forgotten
        self._firsts[delta.choice] = self._firsts[delta.choice] or delta.first
        in_choice, in_chunk = self._token_ids(delta) if self._parts.show_ids else (b"", b"")
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (
            delta.choice,
            self._text(delta),
            self._logprobs(delta),
            encode(finish_reason(delta, self._parts.names_tool)),
            in_choice,
        )
        self._started[delta.choice] = True
        return self._begin + choice + b"]" + in_chunk + self._running_usage(delta) + b"}\n\n"

    def last(self) -> bytes:
        """The usage event, if asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        total = encode(self._usage(self._counts, self._firsts, self._reasoning, self._forgotten))
        return self._begin + b'],"usage":' + total + b"}\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error body as an event, and the end of the stream."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, answers: list[Delta]) -> bytes:
        """The JSON body of an answer without streaming."""
        counts, firsts = [a.num_tokens for a in answers], [a.first for a in answers]
        forgotten = [answer.num_forgotten for answer in answers]
        total = self._usage(counts, firsts, [a.num_reasoning for a in answers], forgotten)
        if self._parts.num_returned:
            answers = best(answers, self._parts.n, self._parts.num_returned)
        choices = [self._choice(answer) for answer in answers]
        body = {**self._shared(self._kind), "choices": choices, "usage": total}
        if self._parts.show_ids and self._is_chat:
            body["prompt_token_ids"] = self._parts.prompt_of(0)
        return encode(body)

    def _usage(
        self,
        counts: Sequence[int],
        firsts: Sequence[FirstToken | None],
        reasoning: Sequence[int],
        forgotten: Sequence[int | None],
    ) -> dict[str, Any]:
        parts, num_reasoning = self._parts, sum(reasoning) if self._is_chat else None
        total = parts.num_prompt, sum(counts)
        return usage(*total, firsts, parts.n, parts.ttft_details, num_reasoning, forgotten)

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

    def _choice(self, answer: Delta) -> dict[str, object]:
        content: dict[str, object] = {"text": answer.text}
        if self._is_chat:
            content = {"message": whole_message(answer)}
        written = self._parts.formats[answer.choice]
        logprobs = written.write(answer.logprobs) if written else None
        reason = finish_reason(answer, self._parts.names_tool)
        choice = {"index": answer.choice, **content, "logprobs": logprobs, "finish_reason": reason}
        if self._parts.show_ids:
            choice["token_ids"] = answer.token_ids
            prompt = self._parts.prompt_of(answer.choice)
            choice |= {} if self._is_chat else {"prompt_token_ids": prompt}
        return choice

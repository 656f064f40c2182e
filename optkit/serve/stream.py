"""Server-sent events as OpenAI clients read them.

Rules (they are what makes a client's TTFT and inter-token latency true):

- nothing is sent before the first token: ``role`` travels with the first content, not ahead of it;
- one chunk per token, as far as the text allows (half a character is no text);
- the last chunk of a choice has its ``finish_reason``; then, if asked, one usage chunk with ``choices: []``;
  then ``[DONE]``. With ``include_usage`` all other chunks say ``usage: null``, or the running count with
  ``continuous_usage_stats``;
- an error after the first byte is an event with the error body, and ``[DONE]`` still ends the stream.

This runs once per token per client, so a chunk is two constant byte strings around one JSON string; there
is no model object and no dict in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.types import FirstToken
from optkit.serve.api_error import ApiError
from optkit.serve.generation import Delta
from optkit.serve.logprobs import LogprobFormat

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


@dataclass(frozen=True)
class ReplyHead:
    """What all chunks of one answer share."""

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
        firsts: what the engine said with the first token of each choice; ``n`` choices share a prompt.
        ttft_details: also say, for each choice and in seconds, where the time to its first token went.
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


class ChunkWriter:
    """Writes the events of one answer.

    Args:
        head: id, model, kind.
        prompt_lengths: tokens of each prompt; its choices follow each other.
        formats: how the logprobs of each choice are written; None: not asked for.
        include_usage: send the final usage chunk.
        continuous: also send the running usage in every chunk.
        ttft_details: the final usage says where the time to the first token went.
    """

    def __init__(
        self,
        head: ReplyHead,
        prompt_lengths: list[int],
        formats: list[LogprobFormat | None],
        include_usage: bool = False,
        continuous: bool = False,
        ttft_details: bool = False,
    ) -> None:
        kind = "chat.completion.chunk" if head.is_chat else "text_completion"
        shared = {"id": head.reply_id, "object": kind, "created": head.created, "model": head.model}
        self._begin = b"data: " + encode(shared)[:-1] + b',"choices":['
        self._is_chat, self._prompt_lengths = head.is_chat, prompt_lengths
        self._include_usage, self._continuous = include_usage, include_usage and continuous
        self._formats, self._n = formats, len(formats) // len(prompt_lengths)
        self._counts = [0] * len(formats)
        self._started = [False] * len(formats)
        self._firsts: list[FirstToken | None] = [None] * len(formats)
        self._ttft_details = ttft_details

    def chunk(self, delta: Delta) -> bytes:
        """The event for one delta."""
        self._counts[delta.choice] = delta.num_tokens
        self._firsts[delta.choice] = self._firsts[delta.choice] or delta.first
        finish = b"null" if delta.finish_reason is None else encode(delta.finish_reason.value)
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (
            delta.choice,
            self._text(delta),
            self._logprobs(delta),
            finish,
        )
        return self._begin + choice + b"]" + self._running_usage(delta) + b"}\n\n"

    def last(self) -> bytes:
        """The usage event, if asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        sums = sum(self._prompt_lengths), sum(self._counts)
        total = encode(usage(*sums, self._firsts, self._n, self._ttft_details))
        return self._begin + b'],"usage":' + total + b"}\n\n" + DONE

    def _text(self, delta: Delta) -> bytes:
        text = encode(delta.text)
        if not self._is_chat:
            return b'"text":' + text
        if not self._started[delta.choice]:
            self._started[delta.choice] = True
            return b'"delta":{"role":"assistant","content":' + text + b"}"
        return b'"delta":{"content":' + text + b"}" if delta.text else b'"delta":{}'

    def _logprobs(self, delta: Delta) -> bytes:
        form = self._formats[delta.choice]
        return b"null" if form is None or not delta.logprobs else encode(form.write(delta.logprobs))

    def _running_usage(self, delta: Delta) -> bytes:
        if not self._include_usage:
            return b""
        if not self._continuous:
            return b',"usage":null'
        counts = self._prompt_lengths[delta.choice // self._n], delta.num_tokens
        return b',"usage":' + encode(usage(*counts, [self._firsts[delta.choice]]))


def error_event(error: ApiError) -> bytes:
    """The error body as an event, and the end of the stream."""
    return b"data: " + error.body() + b"\n\n" + DONE


def whole_reply(
    head: ReplyHead,
    prompt_lengths: list[int],
    answers: list[Delta],
    formats: list[LogprobFormat | None],
    ttft_details: bool = False,
) -> bytes:
    """The JSON body of an answer that is not streamed."""
    firsts = [answer.first for answer in answers]
    sums = sum(prompt_lengths), sum(answer.num_tokens for answer in answers)
    return encode(
        {
            "id": head.reply_id,
            "object": "chat.completion" if head.is_chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(head, answer, form) for answer, form in zip(answers, formats, strict=True)],
            "usage": usage(*sums, firsts, len(formats) // len(prompt_lengths), ttft_details),
        }
    )


def _choice(head: ReplyHead, answer: Delta, form: LogprobFormat | None) -> dict[str, object]:
    reason = answer.finish_reason.value if answer.finish_reason else None
    content: dict[str, object] = {"text": answer.text}
    if head.is_chat:
        content = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
    logprobs = form.write(answer.logprobs) if form else None
    return {"index": answer.choice, **content, "logprobs": logprobs, "finish_reason": reason}

"""Answers of ``/v1/responses``: a response with output items, whole or as events.

An item begins where the kind of text changes: reasoning, message, function call. Items are built from the events' own
pieces: the response at the end of a stream is the sum of the events. As in the chat endpoint no event is sent before
the first token.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from optkit.runtime.types import FinishReason
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.answers import (
    ResponseHead,
    ResponseParts,
    cached_tokens,
    forgotten_details,
    specprefill_details,
)
from optkit.serve.openai.defaults import SamplingDefaults
from optkit.serve.openai.generation import Delta, parts_of
from optkit.serve.openai.protocol import first_given
from optkit.serve.responses.protocol import PARAMS, ResponsesRequest
from optkit.serve.tools.parts import Part

Item = dict[str, Any]


@dataclass(frozen=True)
class ResponsesEndpoint:
    """The words of ``/v1/responses``; an answer repeats most fields of the request."""

    request: ResponsesRequest
    defaults: SamplingDefaults
    operation: str = "chat"
    prefix: str = "resp_"

    @property
    def params(self) -> Mapping[str, str]:
        return PARAMS

    def writer(self, head: ResponseHead, parts: ResponseParts) -> ResponseWriter:
        return ResponseWriter(head, parts, self.request, self.defaults)


class ResponseWriter:
    """Writes the only choice of an answer."""

    def __init__(
        self, head: ResponseHead, parts: ResponseParts, request: ResponsesRequest, defaults: SamplingDefaults
    ) -> None:
        self._head, self._parts = head, parts
        self._fixed = _fixed(head, request, defaults)
        self._output: list[Item] = []
        self._number = 0  # of the next event
        self._kind: tuple[str, int] | None = None  # kind and call of the open item
        self._delta: Delta | None = None
        self._first: Any = None

    # -- the four methods of a writer ----------------------------------------------------------------------------

    def chunk(self, delta: Delta) -> bytes:
        """The events for a delta."""
        events = list(self._begin(delta)) if self._delta is None else []
        self._delta = delta
        events += self._grow(delta)
        return b"".join(events)

    def last(self) -> bytes:
        """The events at the end."""
        events = list(self._close())
        status = _status(self._delta)
        events.append(self._event(f"response.{status}", response=self._response(status)))
        return b"".join(events)

    def failed(self, error: ApiError) -> bytes:
        """The end of a failed stream."""
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed") | {"error": told})

    def whole(self, answers: list[Delta]) -> bytes:
        """The body of an answer without streaming."""
        [answer] = answers
        self._delta, self._first = answer, answer.first
        for _ in (*self._grow(answer), *self._close()):
            pass
        return msgspec.json.encode(self._response(_status(answer)))

    # -- items ---------------------------------------------------------------------------------------------------

    def _begin(self, delta: Delta) -> Iterator[bytes]:
        self._first = delta.first
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _grow(self, delta: Delta) -> Iterator[bytes]:
        """Add the parts of ``delta`` to the output; the first piece of content has the logprobs of all tokens."""
        form = self._parts.formats[0]
        logprobs = form.write(delta.logprobs)["content"] if form and delta.logprobs else []
        for part in parts_of(delta):
            if (part.kind, part.call) != self._kind:
                yield from self._close()
                yield from self._open(part)
            if part.kind == "content":
                self._output[-1]["content"][0]["logprobs"] += logprobs
                yield from self._text(part, logprobs)
                logprobs = []
            elif part.text:
                yield from self._text(part, None)

    def _open(self, part: Part) -> Iterator[bytes]:
        self._kind = (part.kind, part.call)
        item = _new_item(part)
        self._output.append(item)
        bare = item | ({"content": []} if "content" in item else {})
        yield self._event("response.output_item.added", output_index=self._index, item=bare)
        if part.kind != "call":
            yield self._event("response.content_part.added", **self._place(0), part=item["content"][0])

    def _text(self, part: Part, logprobs: list[Any] | None) -> Iterator[bytes]:
        item = self._output[-1]
        if part.kind == "call":
            item["arguments"] += part.text
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=part.text)
            return
        item["content"][0]["text"] += part.text
        more = {} if logprobs is None else {"logprobs": logprobs}
        name = "output_text" if part.kind == "content" else "reasoning_text"
        yield self._event(f"response.{name}.delta", **self._place(0), delta=part.text, **more)

    def _close(self) -> Iterator[bytes]:
        """End the open item; the last item of a cut answer is incomplete."""
        if self._kind is None:
            return
        (kind, _), item, self._kind = self._kind, self._output[-1], None
        item["status"] = _status(self._delta)
        if kind == "call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if kind == "content" else {}
            name = "output_text" if kind == "content" else "reasoning_text"
            yield self._event(f"response.{name}.done", **self._place(0), text=part["text"], **more)
            yield self._event("response.content_part.done", **self._place(0), part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _place(self, content_index: int | None = None) -> Item:
        place = {"item_id": self._output[-1]["id"], "output_index": self._index}
        return place if content_index is None else place | {"content_index": content_index}

    # -- bodies --------------------------------------------------------------------------------------------------

    def _event(self, event: str, **fields: Any) -> bytes:
        body = {"type": event, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(body))

    def _response(self, status: str) -> Item:
        """The response object so far."""
        over = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        body = {"status": status, "incomplete_details": cut, "output": self._output}
        return self._fixed | body | {"usage": self._usage() if over else None}

    def _usage(self) -> Item:
        num_prompt, delta = self._parts.num_prompt, self._delta
        num_output, reasoning = (delta.num_tokens, delta.num_reasoning) if delta else (0, 0)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": cached_tokens([self._first]) or 0,
                "cache_write_tokens": 0,
            }
            | specprefill_details([self._first]),
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": num_prompt + num_output,
            **forgotten_details([delta.num_forgotten if delta else None]),
        }


def _status(delta: Delta | None) -> str:
    return "incomplete" if delta and delta.finish_reason is FinishReason.LENGTH else "completed"


def _new_item(part: Part) -> Item:
    """The item of ``part``, without text."""
    if part.kind == "call":
        item = {"id": _name("fc_"), "type": "function_call", "call_id": part.call_id, "name": part.name}
        return item | {"arguments": "", "status": "in_progress"}
    if part.kind == "reasoning":
        text = {"type": "reasoning_text", "text": ""}
        return {
            "id": _name("rs_"),
            "type": "reasoning",
            "summary": [],
            "content": [text],
            "status": "in_progress",
        }
    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    fixed = {"id": _name("msg_"), "type": "message", "role": "assistant"}
    return fixed | {"content": [content], "status": "in_progress"}


def _name(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _fixed(head: ResponseHead, request: ResponsesRequest, defaults: SamplingDefaults) -> Item:
    """The fields of a response without influence of the answer."""
    sent = request.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "id": head.reply_id,
        "object": "response",
        "created_at": head.created,
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": head.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_diagnostics": None,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "store": False,
        "temperature": first_given(request.temperature, defaults.temperature, 1.0),
        "text": sent.get("text") or {"format": {"type": "text"}},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": [{"strict": None, "parameters": None, **tool} for tool in sent.get("tools", ())],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": first_given(request.top_p, defaults.top_p, 1.0),
        "truncation": "disabled",
        "user": request.user,
    }

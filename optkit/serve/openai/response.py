"""The HTTP answer to a generation request, from admission to the last byte.

A ``GenerationResponse`` takes permits, has the prompt tokenized, generates, writes, and gives the permits back. A
second task listens for the client's disconnect. When the client goes, the first task is cancelled at any point, which
aborts the requests in the engine.

The status line of a stream waits for the first token. So a failure before the first token is a 500, on which clients
and load balancers can act, and not a 200 with an error inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optkit.serve.app_state import AppState, mark_complete
from optkit.serve.http.disconnect import until_disconnect
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.answers import AnswerWriter, Endpoint, ResponseHead, ResponseParts
from optkit.serve.openai.generation import TTFT_UNREACHABLE, Delta, collect
from optkit.serve.openai.jobs import Sender
from optkit.serve.openai.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormat
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from optkit.serve.openai.sources import deltas_of
from optkit.serve.shutdown import FINAL_ERROR_TIMEOUT_SECONDS
from optkit.serve.tracing import SpanRecord

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Answers ``request``, which arrived at ``arrival`` (``time.monotonic()``).

    Args:
        endpoint: writes the answer.
        tenant: name of the request's API key; requests of different tenants share no cached KV.
        parent: the headers with the trace of the request.
    """

    def __init__(
        self,
        state: AppState,
        request: GenerationRequest,
        endpoint: Endpoint,
        arrival: float,
        tenant: str = "",
        parent: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._state, self._request, self._endpoint = state, request, endpoint
        self._sender = Sender(uuid.uuid4().hex, arrival, tenant)
        name = endpoint.prefix + (request.request_id or self._sender.name)
        model = state.settings.model_names[0] if request.model is None else request.model
        self._head = ResponseHead(name, int(time.time()), model, state.settings.fingerprint)
        self._record = SpanRecord(
            operation=endpoint.operation,
            reply_id=name,
            model=model,
            arrival=arrival,
            parent=parent or {},
            max_tokens=request.requested_max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(self._answer(scope, send), receive)

    async def _answer(self, scope: Scope, send: Send) -> None:
        """Answer the request, or report the failure, and log a line."""
        wire, outcome = Wire(send), "ok"
        try:
            async with self._state.requests.limit(self._state.deadline(self._sender.arrival)):
                await self._generate_and_send(wire)
            mark_complete(scope)
        except asyncio.CancelledError:  # the client is gone
            outcome = "cancelled"
            raise
        except Exception as error:
            failure = self._failure(error)
            outcome = failure.code or "error"
            if failure.code == TTFT_UNREACHABLE:
                self._state.metrics.rejections["ttft_slo"].inc()
            if not wire.started:
                raise failure from error
            await wire.fail(failure)
        finally:
            self._record.outcome = outcome
            self._log()

    def _failure(self, error: Exception) -> ApiError:
        """``error`` as an error for the client, with the endpoint's own names of fields."""
        failure = self._state.failure(error)
        failure.rename(self._endpoint.params)
        return failure

    def _log(self) -> None:
        """The line in the log, and the span of the trace."""
        done = self._record
        # of the first choice: the parts of its time to first token
        parts = done.first.parts() if done.first else {}
        times = {name: round(value, 4) for name, value in parts.items()}
        stream, output = bool(self._request.stream), done.num_output
        self._state.log_answered(done, self._sender.tenant, stream=stream, completion_tokens=output, **times)

    async def _generate_and_send(self, wire: Wire) -> None:
        request, state = self._request, self._state
        count = len(request.prompt) if isinstance(request, CompletionRequest) else 1
        with state.admission.permits(count * request.num_choices):
            jobs = await state.prompts.jobs(request, self._sender)
            parts = ResponseParts(
                prompts=[job.request.prompt_ids for job in jobs if job.n],
                formats=[self._logprob_format() for _ in jobs],
                show_ids=bool(request.return_token_ids),
                ttft_details=bool(request.ttft_details),
                names_tool=isinstance(request, ChatRequest) and request.names_tool,
                num_returned=request.num_returned if request.is_ranked else 0,
            )
            wire.writer = self._endpoint.writer(self._head, parts)
            self._record.num_prompt = sum(map(len, parts.prompts))
            self._record.expect(len(jobs))
            tokenizer = state.prompts.tokenizer
            deltas = deltas_of(request, jobs, state.engine, tokenizer, state.metrics)
            if request.stream:
                await self._stream(deltas, wire, wire.writer)
            else:
                answers = await collect(deltas, len(jobs), self._observe)
                await wire.whole(wire.writer.whole(answers))

    def _logprob_format(self) -> LogprobFormat | None:
        if self._request.num_logprobs is None:
            return None
        texts, as_ids = self._state.prompts.tokenizer.token_texts, self._request.return_tokens_as_token_ids
        kind = ChatLogprobs if isinstance(self._request, ChatRequest) else CompletionLogprobs
        return kind(texts, bool(as_ids))

    def _observe(self, delta: Delta) -> None:
        """Count ``delta`` for the log line and the trace."""
        reason = delta.finish_reason.value if delta.finish_reason else ""
        self._record.observe(delta.choice, delta.num_tokens, reason, delta.first)

    async def _stream(self, deltas: AsyncGenerator[Delta, None], wire: Wire, writer: AnswerWriter) -> None:
        async with aclosing(deltas):
            async for delta in deltas:
                self._observe(delta)
                await wire.event(writer.chunk(delta))
        await wire.event(writer.last(), more=False)


class Wire:
    """Sends one JSON body, or server-sent events, the first of them with the response head.

    Attributes:
        writer: of the answer, once there is a prompt.
    """

    def __init__(self, send: Send) -> None:
        self._send, self.started, self._streams = send, False, False
        self.writer: AnswerWriter | None = None

    async def event(self, event: bytes, more: bool = True) -> None:
        if not self.started:
            self.started = self._streams = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def whole(self, body: bytes) -> None:
        self.started = True
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """End a stream with ``error``; a client that does not read delays the end by a second at most."""
        if self._streams and self.writer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINAL_ERROR_TIMEOUT_SECONDS):
                    await self.event(self.writer.failed(error), more=False)

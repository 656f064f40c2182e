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
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.engine_api import AsyncEngine, ServeSettings
from optkit.serve.http.admission import Admission
from optkit.serve.http.errors import ApiError, internal_error
from optkit.serve.metrics import Metrics
from optkit.serve.openai.answers import AnswerWriter, Endpoint, ResponseHead, ResponseParts
from optkit.serve.openai.beams import beam_text
from optkit.serve.openai.generation import TTFT_UNREACHABLE, Delta, collect, generate_text, merge
from optkit.serve.openai.jobs import ChoiceJob, Sender
from optkit.serve.openai.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormat
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest, first_given
from optkit.serve.shutdown import FINAL_ERROR_TIMEOUT_SECONDS, RequestsInFlight, shutting_down
from optkit.serve.tracing import SpanRecord, Tracing

log = logging.getLogger("optkit.serve")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class AppState:
    """The server's parts for answering a request."""

    engine: AsyncEngine
    prompts: PromptReader
    metrics: Metrics
    admission: Admission
    settings: ServeSettings
    constraints: ConstraintChecker
    tracing: Tracing | None = None
    requests: RequestsInFlight = field(default_factory=RequestsInFlight)

    def check(self, request: GenerationRequest) -> None:
        """Refuse wrong requests before the prompt is tokenized.

        Raises:
            ApiError: 400, 404 unknown model, 503 the engine is gone.
        """
        self.check_model(request.model)
        if request.priority and self.settings.limits.scheduling_policy == "fcfs":
            message = "priorities need a server with --scheduling-policy slo"
            raise ApiError(message, param="priority", code="unsupported_parameter")
        self.prompts.check_token_ids(request)
        self.check_engine()

    def check_engine(self) -> None:
        """Raise the 503 of a server whose engine is gone."""
        if not self.engine.is_healthy:
            raise ApiError(
                "the engine is not available", code="engine_unavailable", status=503, retry_after=5
            )

    def check_model(self, name: str | None) -> None:
        """Raise the 404 of a model that is not served."""
        if name is not None and name not in self.settings.model_names:
            message = "this model is not served here; GET /v1/models lists what is"
            raise ApiError(message, param="model", code="model_not_found", status=404)


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
        work = asyncio.create_task(self._answer(send))
        watch = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone = not work.done()
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not gone:
            work.result()

    async def _answer(self, send: Send) -> None:
        """Answer the request, or report the failure, and log a line."""
        wire, outcome = Wire(send), "ok"
        try:
            async with self._state.requests.limit(self._deadline()):
                await self._generate_and_send(wire)
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

    def _deadline(self) -> float | None:
        """The end of the request's time, on the event loop's clock."""
        limit = self._state.settings.request_timeout
        if limit is None:
            return None
        return asyncio.get_running_loop().time() + self._sender.arrival + limit - time.monotonic()

    def _failure(self, error: Exception) -> ApiError:
        """``error`` as an error for the client."""
        if isinstance(error, ApiError):
            error.param = self._endpoint.params.get(error.param or "", error.param)
            return error
        if isinstance(error, TimeoutError) and self._state.requests.is_cut:
            return shutting_down()
        if isinstance(error, TimeoutError):
            limit = self._state.settings.request_timeout
            return ApiError(f"not answered within {limit:g} s", code="request_timeout", status=504)
        return internal_error(error)

    def _log(self) -> None:
        """The line in the log, and the span of the trace."""
        done = self._record
        if self._state.tracing:
            self._state.tracing.record(done)
        event = {
            "id": done.reply_id,
            "outcome": done.outcome,
            "stream": bool(self._request.stream),
            "seconds": round(time.monotonic() - self._sender.arrival, 3),
            "tenant": self._sender.tenant,
            "prompt_tokens": done.num_prompt,
            "completion_tokens": done.num_output,
        }
        if done.first:  # of the first choice: the parts of its time to first token
            event |= {name: round(value, 4) for name, value in msgspec.structs.asdict(done.first).items()}
        log.info("request", extra={"event": event})

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
            deltas = merge(self._sources(jobs))
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

    def _sources(self, jobs: list[ChoiceJob]) -> list[AsyncGenerator[Delta, None]]:
        """The sources of deltas: of each choice, or with beams of all choices of a prompt."""
        state, request = self._state, self._request
        parts = state.engine, state.prompts.tokenizer, state.metrics
        if not request.use_beam_search:
            return [generate_text(*parts, job) for job in jobs]
        n, penalty = request.num_choices, first_given(request.length_penalty, 1.0)
        return [beam_text(*parts, jobs[at : at + n], penalty) for at in range(0, len(jobs), n)]

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


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""The HTTP answer to a generation request, from admission to the last byte.

The whole life of a request is one ``Reply``: take slots, tokenize, generate, write, give the slots back. It
runs beside a task that listens for the client's disconnect; when the client goes, the work is cancelled at
whatever point it has reached, and cancelling it aborts the sequences in the engine.

The status line of a stream waits for the first token. So an engine that fails before it answers 500, which
clients and load balancers can act on, and not 200 with bad news inside.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optkit.runtime.types import EngineRequest
from optkit.serve.admission import Admission
from optkit.serve.api_error import ApiError, internal_error
from optkit.serve.engine_api import Engine, ServeSettings
from optkit.serve.generation import Delta, Work, collect, generate_text, merge
from optkit.serve.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormat
from optkit.serve.metrics import Metrics
from optkit.serve.prompts import Prompt, PromptReader
from optkit.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from optkit.serve.stream import ChunkWriter, ReplyHead, error_event, whole_reply

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Service:
    """The parts that answering a request takes."""

    engine: Engine
    prompts: PromptReader
    metrics: Metrics
    admission: Admission
    settings: ServeSettings

    def check(self, request: GenerationRequest) -> None:
        """Refuse early what needs no tokenizer to refuse.

        Raises:
            ApiError: 400, 404 unknown model, 503 the engine is gone.
        """
        if request.model and request.model not in self.settings.model_names:
            message = "this model is not served here; GET /v1/models lists what is"
            raise ApiError(message, param="model", code="model_not_found", status=404)
        if request.priority and self.settings.scheduling_policy == "fcfs":
            message = "priorities need a server with --scheduling-policy slo"
            raise ApiError(message, param="priority", code="unsupported_parameter")
        self.prompts.check_token_ids(request)
        if not self.engine.is_healthy:
            raise ApiError(
                "the engine is not available", code="engine_unavailable", status=503, retry_after=5
            )


class Reply(Response):
    """Answers ``request``, which arrived at ``arrival`` (``time.monotonic()``)."""

    def __init__(self, service: Service, request: GenerationRequest, arrival: float) -> None:
        super().__init__()
        self._service, self._request, self._arrival = service, request, arrival
        self._is_chat = isinstance(request, ChatRequest)
        name = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        model = request.model or service.settings.model_names[0]
        self._head = ReplyHead(name, int(time.time()), model, self._is_chat)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        watch = asyncio.create_task(_disconnect(receive))
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
        request = self._request
        count = len(request.prompt) if isinstance(request, CompletionRequest) else 1
        with self._service.admission.slots(count * request.num_choices):
            prompts = await self._service.prompts.read(request)
            works = [work for at, prompt in enumerate(prompts) for work in self._works(at, prompt)]
            deltas = merge([self._generate(work) for work in works])
            formats = [self._logprob_format() for _ in works]
            lengths = [len(prompt.ids) for prompt in prompts]
            if request.stream:
                await self._stream(deltas, lengths, formats, send)
            else:
                await self._whole(deltas, lengths, formats, send)

    def _works(self, at: int, prompt: Prompt) -> Iterator[Work]:
        """The ``n`` choices of the prompt number ``at``."""
        prompts, request = self._service.prompts, self._request
        budget, n = prompts.token_budget(request, len(prompt.ids)), request.num_choices
        for j in range(n):
            index = at * n + j
            engine_request = EngineRequest(
                request_id=f"{self._head.reply_id}-{index}",
                prompt_ids=tuple(prompt.ids),
                sampling=request.sampling(max(budget, 1), prompts.tokenizer.eos_ids, j),
                arrival=self._arrival,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
            )
            yield Work(
                index=index,
                request=engine_request,
                stops=request.stop,
                keep_stop=bool(request.include_stop_str_in_output),
                skip_special=request.skip_special_tokens is not False,
                echo=prompt.text if request.echoes else None,
                prompt_only=budget == 0,
                list_stop_token=not self._is_chat,
                n=n if j == 0 else 0,
            )

    def _logprob_format(self) -> LogprobFormat | None:
        if self._request.num_logprobs is None:
            return None
        texts = self._service.prompts.tokenizer.token_texts
        return ChatLogprobs(texts) if self._is_chat else CompletionLogprobs(texts)

    def _generate(self, work: Work) -> AsyncGenerator[Delta, None]:
        service = self._service
        return generate_text(service.engine, service.prompts.tokenizer, service.metrics, work)

    async def _whole(
        self,
        deltas: AsyncGenerator[Delta, None],
        lengths: list[int],
        formats: list[LogprobFormat | None],
        send: Send,
    ) -> None:
        answers = await collect(deltas, len(formats))
        body = whole_reply(self._head, lengths, answers, formats, bool(self._request.ttft_details))
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self,
        deltas: AsyncGenerator[Delta, None],
        lengths: list[int],
        formats: list[LogprobFormat | None],
        send: Send,
    ) -> None:
        options = self._request.stream_options
        usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        details = bool(self._request.ttft_details)
        writer = ChunkWriter(self._head, lengths, formats, usage, continuous, details)
        events = _Events(send)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    await events.write(writer.chunk(delta))
            await events.end(writer.last())
        except asyncio.CancelledError:  # shutdown, or nobody listens and this goes nowhere
            if events.started:
                error = ApiError("the server is shutting down", code="server_shutdown", status=503)
                await events.end(error_event(error))
            raise
        except Exception as error:
            if not events.started:
                raise
            await events.end(error_event(error if isinstance(error, ApiError) else internal_error(error)))


class _Events:
    """Sends events; the first one takes the response head with it."""

    def __init__(self, send: Send) -> None:
        self._send, self.started = send, False

    async def write(self, event: bytes, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def end(self, event: bytes) -> None:
        await self.write(event, more=False)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

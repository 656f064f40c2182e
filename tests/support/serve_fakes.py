"""Scripted engines and the application on them: the whole server without a model."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI

from optkit.runtime.engine import Engine
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import Embedded, PinList, Profiled
from optkit.runtime.process.worker import embedded, failed_output
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.types import EngineRefusal, EngineRequest, EngineStats, FinishReason, TokenOutput
from optkit.serve.app import create_app
from optkit.serve.engine_api import ServeSettings
from optkit.serve.http.address import bind
from optkit.text.chat_template import ChatTemplate
from tests.support.fakes import fake_engine
from tests.support.tiny_tokenizer import TEXT, fast_tokenizer, tiny_tokenizer

VECTOR_SIZE = 16
EOS = fast_tokenizer().token_to_id("<|im_end|>")


class FakeEngine:
    """Answers each request with ``script`` (text or ids), then end-of-sequence.

    Attributes:
        requests: all requests, in order.
        aborted: ids of requests with an abandoned generator.
        delay: seconds before each token.
        fail_after: number of tokens before the request fails.
        tokens_per_output: more than one as with speculation.
        gate: if set, each request waits for the gate before the first token.
        embedded: the texts and the pooling of each message of texts.
        embed_error: the error in place of vectors, and whether it is the request's.
    """

    def __init__(self, script: str | Callable[[EngineRequest], str] = TEXT) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.sent_tokens = 0
        self.delay = 0.0
        self.fail_after: int | None = None
        self.tokens_per_output = 1
        self.gate: asyncio.Event | None = None
        self.is_healthy, self.is_restarting, self.num_restarts = True, False, 0
        self.resets = 0
        self.profiled_steps = 0  # of the profile under way
        self.embedded: list[tuple[tuple[tuple[int, ...], ...], Pooling]] = []
        self.embed_error: tuple[str, bool] | None = None
        self.stats = EngineStats(num_running=2, num_waiting=3, kv_blocks_used=1, kv_blocks_total=4)
        self.info: EngineInfo | None = None

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        self.embedded.append((tuple(map(tuple, prompts)), pooling))
        try:
            if self.gate:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted.append("embed")
            raise
        if self.embed_error is not None:
            return Embedded("embed", error=self.embed_error[0], is_user_error=self.embed_error[1])
        return Embedded("embed", fake_vectors(prompts, pooling).tobytes(), VECTOR_SIZE)

    async def pins(self, drop: str | None = None) -> PinList:
        return PinList("pins")

    async def start_profile(self, steps: int) -> Profiled:
        is_conflict, self.profiled_steps = self.profiled_steps > 0, steps
        return Profiled("profile", error="it runs" if is_conflict else None, is_conflict=is_conflict)

    async def stop_profile(self, directory: str) -> Profiled:
        if not self.profiled_steps:
            return Profiled("profile", error="there is none", is_conflict=True)
        counts, self.profiled_steps = {"decode": self.profiled_steps}, 0
        return Profiled("profile", (f"{directory}/profile.html",), counts)

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        done = False
        try:
            if self.gate:
                await self.gate.wait()
            for output in self._outputs(request):
                await asyncio.sleep(self.delay)
                self.sent_tokens += len(output.token_ids)
                done = output.finish_reason is not None
                yield output
        finally:
            (self.finished if done else self.aborted).append(request.request_id)

    def _outputs(self, request: EngineRequest) -> Sequence[TokenOutput]:
        text = self.script if isinstance(self.script, str) else self.script(request)
        ids = fast_tokenizer().encode(text, add_special_tokens=False).ids
        limit = request.sampling.max_tokens
        if self.fail_after is not None:
            good = [_output(request, [token]) for token in ids[: self.fail_after]]
            return [*good, _output(request, [], FinishReason.ERROR, "secret /path 0xdeadbeef")]
        size, shown = self.tokens_per_output, ids[:limit]
        outputs = [_output(request, shown[at : at + size]) for at in range(0, len(shown), size)]
        if len(ids) >= limit:
            outputs[-1] = _output(request, list(outputs[-1].token_ids), FinishReason.LENGTH)
            return outputs
        return [*outputs, _output(request, [], FinishReason.STOP, stop_token=EOS)]


def fake_vectors(prompts: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
    """Vectors [prompts, VECTOR_SIZE] float32, random by text and pooling."""
    seeds = [zlib.crc32(repr((tuple(prompt), pooling)).encode()) for prompt in prompts]
    return np.stack(
        [np.random.default_rng(seed).standard_normal(VECTOR_SIZE).astype(np.float32) for seed in seeds]
    )


class LateEngine(FakeEngine):
    """An engine that refuses every request: the first token would be late."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        yield _output(request, [], FinishReason.ERROR, "late", retry_after=2.3)


class SteppedEngine:
    """The real engine, by default on a fake model, stepped on the event loop of the waiting reader."""

    def __init__(self, engine: Engine | None = None, **options: Any) -> None:
        defaults = {"vocab_size": 302, "num_blocks": 512, "max_model_len": 512, "max_num_batched_tokens": 64}
        self.engine = engine or fake_engine(options=defaults | options)
        self.is_healthy, self.is_restarting, self.num_restarts = True, False, 0
        self._streams: dict[str, list[TokenOutput]] = {}
        self._vectors: dict[str, Embedded] = {}
        self._names = itertools.count()

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def info(self) -> EngineInfo:
        return self.engine.info()

    async def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        name = f"embed-{next(self._names)}"
        self.engine.add_embedding(name, prompts, pooling)
        while name not in self._vectors:
            for message in self.engine.embed_step():
                self._vectors[message.request_id] = embedded(message)
            await asyncio.sleep(0)
        return self._vectors.pop(name)

    async def pins(self, drop: str | None = None) -> PinList:
        if drop is not None:
            self.engine.unpin(drop)
        return PinList("pins", tuple(self.engine.pins()))

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        try:
            self.engine.add_request(request)
        except EngineRefusal as refusal:
            yield failed_output(request.request_id, str(refusal))
            return
        ready = self._streams[request.request_id] = []
        try:
            while True:
                if not ready:
                    self._step()
                await asyncio.sleep(0)
                while ready:
                    yield (output := ready.pop(0))
                    if output.finish_reason:
                        return
        finally:
            del self._streams[request.request_id]
            self.engine.abort(request.request_id)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)


def _output(
    request: EngineRequest,
    ids: list[int],
    reason: FinishReason | None = None,
    error: str | None = None,
    **more: Any,
) -> TokenOutput:
    name = request.request_id
    return TokenOutput(request_id=name, token_ids=tuple(ids), finish_reason=reason, error=error, **more)


def settings(**changes: Any) -> ServeSettings:
    """``ServeSettings`` with changes, which are fields of ``ServeSettings`` or of its limits."""
    limits = {"max_model_len": 512, "num_blocks": 512}
    limits |= {name: changes.pop(name) for name in SchedulerConfig.__struct_fields__ if name in changes}
    return ServeSettings(**{"model_names": ("tiny", "alias"), "limits": SchedulerConfig(**limits)} | changes)


def tiny_app(
    engine: FakeEngine | SteppedEngine | None = None, template: str | None = None, **changes: Any
) -> FastAPI:
    """The server's application on a fake engine; ``template`` replaces the chat template."""
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = ChatTemplate(template, {"bos_token": ""})
    return create_app(engine or FakeEngine(), tokenizer, settings(**changes))


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve ``app`` from a thread; gives the URL. For clients with transports of their own."""
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def prompt_of(request: EngineRequest) -> str:
    """The prompt's text, special tokens included."""
    return fast_tokenizer().decode(list(request.prompt_ids), skip_special_tokens=False)


def client(app: FastAPI) -> httpx.AsyncClient:
    """An in-process client; server errors become responses, as on the network."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a request on a new event loop."""

    async def go() -> httpx.Response:
        async with client(app) as http:
            return await http.request(method, path, **options)

    return asyncio.run(go())


def post(app: FastAPI, path: str, body: Any) -> httpx.Response:
    """POST ``body`` as JSON on a new event loop."""
    return call(app, "POST", path, json=body)


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [block.removeprefix("data: ") for block in text.split("\n\n") if block]

"""EngineClient: the API process's side of the engine process.

``start`` sends a launched worker (``optkit.runtime.process.launch``) a ``Load`` message and waits until the worker is
ready. ``generate`` is an async iterator of ``TokenOutput``; leaving the iterator early, by ``break`` with ``aclose``
or by cancellation, aborts the request and frees the KV. When the worker dies, the pipe closes and every open stream
ends with an ERROR output, so no client hangs. A new ``EngineClient`` replaces a dead worker
(``optkit.serve.supervisor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import msgspec

from optkit.errors import UserError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.info import EngineInfo
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.pooling import Pooling
from optkit.runtime.process import ipc
from optkit.runtime.process.launch import DEFAULT_FACTORY, Launched, launch
from optkit.runtime.report import Mark
from optkit.runtime.types import EngineRequest, EngineStats, FinishReason, TokenOutput

logger = logging.getLogger(__name__)

A = TypeVar("A", ipc.Embedded, ipc.PinList, ipc.Profiled, ipc.Reported)

TICK_SECONDS = 1.0
POLL_SECONDS = 0.005
STOP_SECONDS = 2.0  # for leaving by itself; then SIGKILL
ENGINE_DIED = "the engine died"
ENGINE_GONE = "the engine died before it began the request"
ENGINE_STOPPED = "the engine was stopped"


class Casualty(NamedTuple):
    """A request begun by the engine before the engine's death, and the number of tokens of the answer so far."""

    request: EngineRequest
    num_tokens: int


@dataclass(eq=False)
class _Stream:
    """The outputs of a request, waiting for their consumer."""

    request: EngineRequest
    outputs: asyncio.Queue[TokenOutput] = field(default_factory=asyncio.Queue)
    num_tokens: int = 0
    is_begun: bool = False  # the engine has begun to compute the request

    def put(self, output: TokenOutput) -> None:
        self.num_tokens += len(output.token_ids)
        self.outputs.put_nowait(output)


@dataclass(eq=False)
class _Asked:
    """A question to the worker, waiting for an answer of ``kind``."""

    kind: type[ipc.Answer]
    answer: asyncio.Future[ipc.Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class EngineDied(RuntimeError):
    """The engine process ended before it was ready."""


class EngineClient:
    """Starts, feeds and stops one engine process. Use it from a single event loop.

    Args:
        artifact_dir: first argument of the factory.
        options: of the engine.
        factory: ``module:function`` called in the worker as ``function(artifact_dir, options) -> Engine``.
        launched: a waiting worker with the same factory; else ``start`` launches a worker.
        silence_seconds: ``is_silent`` is True after so much time without a message. Time in which the API process did
            not run (SIGSTOP, a sleeping machine) does not count.
        cache_secret: of a deployment whose processes compare digests of cached blocks; empty for a random secret.
        peers: for an exchange of KV with engines of ``cache_secret``.

    Attributes:
        on_death: called with the requests begun before the engine's death, before the streams end.
    """

    def __init__(
        self,
        artifact_dir: str,
        options: EngineOptions | None = None,
        *,
        factory: str = DEFAULT_FACTORY,
        launched: Launched | None = None,
        silence_seconds: float = 60.0,
        cache_secret: bytes = b"",
        peers: PeerSetup | None = None,
    ) -> None:
        self.artifact_dir, self.options = artifact_dir, options or EngineOptions()
        self.factory, self.silence_seconds = factory, silence_seconds
        self._launched, self._cache_secret, self._peers = launched, cache_secret, peers
        self.info: EngineInfo | None = None
        self._stats = EngineStats()
        self._streams: dict[str, _Stream] = {}
        self._asked: dict[str, _Asked] = {}
        self._names = itertools.count()
        self.on_death: Callable[[Sequence[Casualty]], None] = _ignore
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._alive = self._stopping = False
        self._last_message = self._last_tick = 0.0
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self, timeout: float = 3600.0) -> EngineInfo:
        """Have the worker load the artifact and wait until the engine is ready; returns the info.

        Raises:
            UserError: the artifact or an option is wrong.
            EngineDied: the worker failed.
            TimeoutError: after ``timeout`` seconds.
        """
        if self._process is not None:
            raise RuntimeError("an EngineClient starts once")
        self._process, sock = (self._launched or launch(self.factory, self.artifact_dir)).take()
        try:
            reader, self._writer = await asyncio.open_connection(sock=sock)
            self._post(ipc.Load(self.artifact_dir, self.options, self._cache_secret, self._peers))
            self.info = info = await asyncio.wait_for(self._wait_until_ready(reader), timeout)
        except BaseException:
            await self.stop()
            raise
        self._alive = True
        self._last_tick = time.monotonic()
        self._tick()
        self._reading = asyncio.create_task(self._read(reader))
        return info

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        """The outputs of ``request`` on arrival; the last output has a ``finish_reason``."""
        name = request.request_id
        if name in self._streams:
            raise ValueError(f"a request with the id {name!r} is being served")
        if not self._alive:
            yield self._death(name)
            return
        stream = self._streams[name] = _Stream(request)
        try:
            await self._send(request)
            while True:
                output = await stream.outputs.get()
                if output.finish_reason:
                    del self._streams[name]
                    yield output
                    return
                yield output
        finally:
            if self._streams.get(name) is stream:  # left early
                del self._streams[name]
                self._post(ipc.Abort(name))

    async def abort(self, request_id: str) -> None:
        """End a request: the stream gets an ABORT output, the KV is freed. An ended request is ignored."""
        await self._send(ipc.Abort(request_id))

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> ipc.Embedded:
        """The vectors of ``prompts``; an ``error`` in the answer is the reason why there are none.

        Cancelling the call drops the texts from the engine's queue.
        """
        name, is_answered = f"embed-{next(self._names)}", False
        try:
            answer = await self._ask(ipc.Embedded, ipc.Embed(name, tuple(map(tuple, prompts)), pooling))
            is_answered = True
            return answer
        finally:
            if not is_answered:
                self._post(ipc.Abort(name))

    async def pins(self, drop: str | None = None) -> ipc.PinList:
        """The pinned prefixes, after the pin ``drop`` has ended."""
        return await self._ask(ipc.PinList, ipc.AskPins(f"pins-{next(self._names)}", drop))

    async def report(self, since: Mark) -> ipc.Reported:
        """Load, predicted times, and the changes of the cached blocks after ``since``; answered in a step, too."""
        return await self._ask(ipc.Reported, ipc.AskReport(f"report-{next(self._names)}", since))

    async def take_over(self, address: str, num_bytes: int) -> None:
        """Have the engine fetch the most recently used blocks of the leaving engine at ``address``."""
        await self._send(ipc.TakeOver(address, num_bytes))

    async def start_profile(self, steps: int) -> ipc.Profiled:
        """Have the engine record up to ``steps`` steps of each phase."""
        return await self._ask(ipc.Profiled, ipc.StartProfile(f"profile-{next(self._names)}", steps))

    async def stop_profile(self, directory: str) -> ipc.Profiled:
        """Have the engine write its profile into ``directory``."""
        name = f"profile-{next(self._names)}"
        return await self._ask(ipc.Profiled, ipc.StopProfile(name, self.artifact_dir, directory))

    async def _ask(self, kind: type[A], question: ipc.Question) -> A:
        """The worker's answer, or an answer with the reason why there is none."""
        name = question.request_id
        if not self._alive:
            return kind(name, error=ENGINE_GONE)
        asked = self._asked[name] = _Asked(kind)
        try:
            await self._send(question)
            return cast(A, await asked.answer)
        finally:
            del self._asked[name]

    async def reset_prefix_cache(self) -> None:
        """Have the engine drop the KV outside of running requests."""
        await self._send(ipc.ResetPrefixCache())

    @property
    def stats(self) -> EngineStats:
        """The gauges in the engine's last message."""
        return self._stats

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_healthy(self) -> bool:
        """The worker has loaded and the process lives. A long step does not change the value."""
        return self._alive

    @property
    def is_silent(self) -> bool:
        """The worker has sent no message for ``silence_seconds``: a part of a step takes long, or the worker hangs."""
        now = min(time.monotonic(), self._last_tick + 2 * TICK_SECONDS)
        return now - self._last_message >= self.silence_seconds

    def _tick(self) -> None:
        """Exclude from the silence the time in which the API process was stopped and could receive nothing."""
        now = time.monotonic()
        stopped = now - self._last_tick - TICK_SECONDS
        if stopped > TICK_SECONDS:
            self._last_message = min(now, self._last_message + stopped)
        self._last_tick = now
        self._ticking = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def kill(self, *, wanted: bool = False) -> None:
        """End the worker without waiting for the step; the streams end with an error when the process is gone.

        Args:
            wanted: the caller stops the engine, as ``stop`` does, so no error is logged.
        """
        self._stopping = self._stopping or wanted
        if self._process is not None:
            self._process.kill()

    async def wait_dead(self) -> None:
        """Return when a started worker has gone."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def stop(self) -> None:
        """End the worker within 5 seconds, also in the middle of a step, and every open stream."""
        if self._process is None:
            return
        self._stopping = True
        self._post(ipc.Shutdown())
        await end_process(self._process)
        if self._ticking is not None:
            self._ticking.cancel()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    async def _wait_until_ready(self, reader: asyncio.StreamReader) -> EngineInfo:
        try:
            message = await self._receive(reader)
        except (EOFError, ConnectionError):
            code = await end_process(self._process)
            raise EngineDied(f"the engine process ended with code {code} while it was loading") from None
        match message:
            case ipc.Ready(info):
                return info
            case ipc.Failed(what, where, fix, is_user_error=True):
                raise UserError(what, where=where, fix=fix)
            case ipc.Failed(what):
                raise EngineDied(f"the engine failed to load: {what}")
        raise EngineDied("the engine broke the protocol")

    async def _receive(self, reader: asyncio.StreamReader) -> ipc.FromWorker:
        length = ipc.body_length(await reader.readexactly(ipc.HEADER.size))
        message = ipc.from_worker.decode(await reader.readexactly(length))
        self._last_message = time.monotonic()
        return message

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand outputs to their streams until the pipe closes."""
        try:
            while True:
                message = await self._receive(reader)
                if isinstance(message, tuple):
                    self._dispatch(message)
                elif isinstance(message, EngineStats):
                    self._stats = message
                elif isinstance(message, ipc.Begun):
                    self._mark_begun(message)
                elif isinstance(message, ipc.Answer):
                    self._answer(message)
        except (EOFError, ConnectionError):
            pass  # the worker has gone, by order or by accident
        except (ipc.ProtocolError, msgspec.MsgspecError):
            logger.exception("the engine broke the protocol")
        finally:
            self._end_streams()

    def _dispatch(self, outputs: ipc.Outputs) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _answer(self, message: ipc.Answer) -> None:
        asked = self._asked.get(message.request_id)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(message)

    def _mark_begun(self, message: ipc.Begun) -> None:
        for name in self._streams.keys() & message.request_ids:
            self._streams[name].is_begun = True

    def _end_streams(self) -> None:
        self._alive = False
        self._stats = EngineStats()
        if not self._stopping and self._process is not None:
            logger.error("the engine process died; %d requests failed", len(self._streams))
            self._process.kill()  # a worker that broke the protocol still runs
            begun = [stream for stream in self._streams.values() if stream.is_begun]
            self.on_death([Casualty(s.request, s.request.continued + s.num_tokens) for s in begun])
        for name, stream in self._streams.items():
            stream.put(self._death(name))
        reason = ENGINE_STOPPED if self._stopping else ENGINE_DIED
        for name, asked in self._asked.items():
            self._answer(asked.kind(name, error=reason))

    def _death(self, request_id: str) -> TokenOutput:
        stream = self._streams.get(request_id)
        error = ENGINE_DIED if stream is not None and stream.is_begun else ENGINE_GONE
        if self._stopping:
            error = ENGINE_STOPPED
        return TokenOutput(request_id=request_id, token_ids=(), finish_reason=FinishReason.ERROR, error=error)

    def _post(self, message: ipc.ToWorker) -> None:
        """Queue a message without waiting; nothing happens if the worker is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(ipc.frame(message))

    async def _send(self, message: ipc.ToWorker) -> None:
        self._post(message)
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):  # the reading side reports the death
                await self._writer.drain()


def _ignore(casualties: Sequence[Casualty]) -> None:
    """The default of ``EngineClient.on_death``."""


async def end_process(process: subprocess.Popen[bytes] | None) -> int | None:
    """Wait ``STOP_SECONDS`` for the process, then kill it; returns the exit code.

    Asks again and again in place of a thread that waits: an interpreter that ends starts no thread any more.
    """
    if process is None:
        return None
    end = time.monotonic() + STOP_SECONDS
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(POLL_SECONDS)
    if process.poll() is None:
        process.kill()
    return process.wait()

"""The engine process: import, wait for ``Load``, load, send ``Ready``, then step for as long as the parent lives.

``optkit.runtime.process.launch`` starts the process as ``python -m optkit.runtime.process.worker --fd N ...``. A
process apart keeps the model's compute away from the API process's event loop and interpreter lock, and a crash of
native code costs the streams of the engine and not the server.

The loop waits on the socket when there is no work (no polling). Between steps the loop handles the arrived messages.
Between the parts of a long step (``optkit.cancellation``) the loop only reads: a step whose every request is aborted
is cancelled, a ``Shutdown`` ends the process, and a heartbeat shows progress. All work happens on the main thread.
The loop ends when the parent sends ``Shutdown``, closes the pipe or dies. On Linux the kernel then kills the process
(PR_SET_PDEATHSIG), even in the middle of a load. SIGINT and SIGTERM are ignored: Ctrl-C reaches both processes, a
service manager ends all processes of a service at once (systemd's ``KillMode=control-group``), and the parent decides.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import msgspec

from optkit.errors import UserError
from optkit.kernels.cpu.decode_steps import Outlet
from optkit.kernels.cpu.threads import set_threads
from optkit.machine import logs
from optkit.machine.heap import keep_freed_memory
from optkit.machine.parent import die_with_parent, leave_signals_to_parent
from optkit.machine.stack_room import OF_A_PROCESS, with_stack_room
from optkit.machine.target import usable_cores
from optkit.runtime.info import EngineInfo
from optkit.runtime.multi_step import ANY_TOKEN
from optkit.runtime.process import ipc
from optkit.runtime.process.launch import DEFAULT_FACTORY
from optkit.runtime.process.profiler import WHILE_WRITING_SECONDS, EngineProfiler
from optkit.runtime.saving import has_saved
from optkit.runtime.types import (
    EngineLost,
    EngineOverload,
    EngineRefusal,
    EngineRequest,
    FinishReason,
    TokenOutput,
)

if TYPE_CHECKING:
    from optkit.runtime.embedding import Embedding
    from optkit.runtime.engine import Engine

logger = logging.getLogger(__name__)

FACTORY_PREFIXES = ("optkit.", "tests.")
HEARTBEAT_SECONDS = 1.0
STATS_SECONDS = 0.1  # between two messages with gauges while no request begins or ends
RECEIVE_BYTES = 1 << 18


class ParentGone(BaseException):
    """The parent closed the pipe or sent ``Shutdown``.

    Not an ``Exception``, because the handler of failed batches inside a step must not catch it.
    """


class Worker:
    """One engine, driven by the messages on ``sock``."""

    def __init__(self, engine: Engine, sock: socket.socket, frames: ipc.FrameReader | None = None) -> None:
        self.engine, self.sock = engine, sock
        self._frames = frames or ipc.FrameReader()
        self._outputs: list[TokenOutput] = []  # answers without a step: refusals, aborts
        self._inbox: deque[ipc.ToWorker] = deque()  # messages that were read and are not handled yet
        self._aborted: set[str] = set()  # requests with an ``Abort`` in the inbox
        self._fetched: deque[EngineRequest] = (
            deque()
        )  # requests back from a fetch, put there by other threads
        self._waker, self._sleeper = socket.socketpair()
        self._waker.setblocking(False)
        self._last_sent, self._stats_sent = time.monotonic(), 0.0
        self._profiler = EngineProfiler(engine)
        engine.departed, engine.wake = self._departed, self._wake
        engine.make_outlet = self._outlet
        engine.scheduler.announce = self._announce

    def serve(self) -> None:
        """Step while there is work, sleep on the socket while there is none, until ``ParentGone``."""
        with self._waker, self._sleeper:
            self._serve()

    def _serve(self) -> None:
        while True:
            busy = self.engine.has_work or self.engine.is_embedding
            idle = WHILE_WRITING_SECONDS if self._profiler.is_writing else HEARTBEAT_SECONDS
            self._receive(timeout=0.0 if busy else idle)
            self._post(*self._profiler.finished())
            if self.engine.has_work:
                self._send(self.engine.step())
            elif self._outputs:
                self._send([])
            elif not self.engine.is_embedding:
                self.engine.alive()
                self._post(ipc.Heartbeat())
            if self.engine.is_embedding:  # a step in turn with the requests'
                for message in self.engine.embed_step():
                    self._post(embedded(message))

    def _post(self, *messages: ipc.FromWorker) -> None:
        if not messages:
            return
        send(self.sock, *messages)
        self._last_sent = time.monotonic()

    def _announce(self, request_ids: Sequence[str]) -> None:
        self._post(ipc.Begun(tuple(request_ids)))

    def _outlet(self, outputs: Sequence[TokenOutput]) -> Outlet:
        """The socket to the parent, for the tokens of several steps; a message on it ends the steps."""
        frame, places = ipc.frame_with_places(tuple(outputs), ANY_TOKEN)
        return Outlet((self.sock.fileno(), self._sleeper.fileno()), self.sock.fileno(), frame, places)

    def _departed(self) -> AbstractSet[str]:
        """The aborted requests, read from the socket between two parts of a step."""
        try:
            self._read(0.0)
        except ipc.ProtocolError as error:
            logger.exception("the parent broke the protocol")
            raise ParentGone from error
        if ipc.Shutdown() in self._inbox:
            raise ParentGone
        if time.monotonic() - self._last_sent >= HEARTBEAT_SECONDS:
            self._post(ipc.Heartbeat())
        self._report()
        return self._aborted

    def _report(self) -> None:
        """Answer the questions for reports among the arrived messages, in the middle of a step."""
        asked = [message for message in self._inbox if isinstance(message, ipc.AskReport)]
        for message in asked:
            self._inbox.remove(message)
            self._post(ipc.Reported(message.request_id, self.engine.report(message.since, in_step=True)))

    def _send(self, outputs: list[TokenOutput]) -> None:
        """Send the outputs of a step, after the gauges when due."""
        message = (*self._outputs, *outputs)
        self._outputs.clear()
        if self._stats_due(message):
            self._stats_sent = time.monotonic()
            self._post(self.engine.stats(), message)
        else:
            self._post(message)

    def _stats_due(self, outputs: ipc.Outputs) -> bool:
        """True when a request has begun or ended in the step, or the last gauges are ``STATS_SECONDS`` old."""
        if any(output.finish_reason or output.first for output in outputs) or not self.engine.has_work:
            return True
        return time.monotonic() - self._stats_sent >= STATS_SECONDS

    def _receive(self, timeout: float) -> None:
        """Handle the arrived messages; wait up to ``timeout`` seconds for the first."""
        self._read(0.0 if self._inbox or self._fetched else timeout)
        self._aborted.clear()
        while self._inbox:
            self._handle(self._inbox.popleft())
        self._queue_fetched()

    def _queue_fetched(self) -> None:
        """Queue the requests that are back from a fetch."""
        while self._fetched:
            self._handle(self._fetched.popleft())

    def _wake(self) -> None:
        """End the wait on the socket; for other threads."""
        with contextlib.suppress(OSError):  # enough was written already, or the worker has left
            self._waker.send(b"w")

    def _hand_back(self, request: EngineRequest) -> None:
        self._fetched.append(request)
        self._wake()

    def _read(self, timeout: float) -> None:
        """Move the arrived messages to the inbox; wait up to ``timeout`` seconds for the first."""
        while ready := select.select([self.sock, self._sleeper], [], [], timeout)[0]:
            timeout = 0.0
            if self._sleeper in ready:
                self._sleeper.recv(RECEIVE_BYTES)
            if self.sock not in ready:
                continue
            messages = self._frames.feed(receive(self.sock))
            self._inbox += messages
            self._aborted |= {m.request_id for m in messages if isinstance(m, ipc.Abort)}

    def _handle(self, message: ipc.ToWorker) -> None:
        match message:
            case ipc.Shutdown():
                raise ParentGone
            case ipc.Abort(request_id):
                self._queue_fetched()
                if self.engine.peers is not None and self.engine.peers.abort(request_id):
                    self._outputs.append(aborted_output(request_id))
                output = self.engine.abort(request_id)
                self._outputs += [output] if output else []
            case ipc.ResetPrefixCache():
                self.engine.reset_prefix_cache()
            case ipc.Embed() as asked:
                self._add_embedding(asked)
            case ipc.AskPins(request_id, drop):
                if drop is not None:
                    self.engine.unpin(drop)
                self._post(ipc.PinList(request_id, tuple(self.engine.pins())))
            case ipc.AskReport(request_id, since):
                self._post(ipc.Reported(request_id, self.engine.report(since)))
            case ipc.StartProfile() as start:
                self._post(self._profiler.start(start))
            case ipc.StopProfile() as stop:
                if answer := self._profiler.stop(stop):
                    self._post(answer)
            case ipc.TakeOver(address, num_bytes):
                if self.engine.peers is not None:
                    self.engine.peers.take_over(address, num_bytes)
            case EngineRequest() as request if self._fetches(request):
                pass
            case EngineRequest() as request:
                try:
                    self.engine.add_request(request)
                except EngineOverload as refusal:
                    later = failed_output(request.request_id, str(refusal), refusal.retry_after)
                    self._outputs.append(later)
                except EngineRefusal as refusal:
                    self._outputs.append(failed_output(request.request_id, str(refusal)))
                except Exception:
                    logger.exception("a request could not be added")
                    self.engine.abort(request.request_id)
                    self._outputs.append(failed_output(request.request_id, "it could not be added"))

    def _fetches(self, request: EngineRequest) -> bool:
        """True where KV of another engine is fetched first; the request comes back (``_hand_back``)."""
        peers = self.engine.peers
        return peers is not None and request.source is not None and peers.fetch(request, self._hand_back)

    def _add_embedding(self, asked: ipc.Embed) -> None:
        try:
            self.engine.add_embedding(asked.request_id, asked.prompts, asked.pooling)
        except (EngineRefusal, UserError) as refusal:
            self._post(ipc.Embedded(asked.request_id, error=str(refusal), is_user_error=True))
        except Exception:
            logger.exception("texts to embed could not be added")
            self._post(ipc.Embedded(asked.request_id, error="the texts could not be added"))


def embedded(message: Embedding) -> ipc.Embedded:
    """The answer to a finished message of texts."""
    if message.error is not None:
        return ipc.Embedded(message.request_id, error=message.error)
    vectors = message.stacked()
    return ipc.Embedded(message.request_id, vectors.tobytes(), vectors.shape[1])


def failed_output(request_id: str, error: str, retry_after: float | None = None) -> TokenOutput:
    """The end of a request without a token, after a failure."""
    return TokenOutput(
        request_id=request_id,
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=error,
        retry_after=retry_after,
    )


def aborted_output(request_id: str) -> TokenOutput:
    """The end of a request without a token, whose client went away."""
    return TokenOutput(request_id=request_id, token_ids=(), finish_reason=FinishReason.ABORT)


def receive(sock: socket.socket) -> bytes:
    try:
        data = sock.recv(RECEIVE_BYTES)
    except ConnectionError:  # a close with unread messages is a reset
        data = b""
    if not data:
        raise ParentGone
    return data


def send(sock: socket.socket, *messages: ipc.FromWorker) -> None:
    """Write ``messages`` in one piece; ParentGone if the parent is gone."""
    try:
        sock.sendall(b"".join(map(ipc.frame, messages)))
    except ConnectionError:
        raise ParentGone from None


def resolve(factory: str) -> Callable[..., Any]:
    """The function ``module:function``; only from modules of optkit and of the tests."""
    module, _, function = factory.partition(":")
    if not module.startswith(FACTORY_PREFIXES):
        raise ValueError(f"{factory} is not a factory of optkit")
    return getattr(importlib.import_module(module), function)


def first_message(sock: socket.socket, frames: ipc.FrameReader) -> ipc.Load:
    """Wait for the ``Load`` message."""
    messages: list[ipc.ToWorker] = []
    while not messages:
        messages = frames.feed(receive(sock))
    first, *more = messages
    if more or not isinstance(first, ipc.Load):  # the parent gave up: nothing else follows before ``Ready``
        raise ParentGone
    return first


def load(args: argparse.Namespace, sock: socket.socket, frames: ipc.FrameReader) -> tuple[Engine, EngineInfo]:
    """The engine and its info. Imports come first, while the parent imports, too."""
    gc.disable()  # imported modules live as long as the process: collections would look at them in vain
    factory = resolve(args.factory)
    if args.factory == DEFAULT_FACTORY and not has_saved(args.artifact):  # a model has to be lowered
        importlib.import_module("torch")
    gc.freeze()
    gc.enable()
    message = first_message(sock, frames)
    set_threads(message.options.threads or usable_cores())
    start = time.monotonic()
    engine = factory(message.artifact_dir, message.options)
    if message.cache_secret:
        engine.share_digests(message.cache_secret)
    if message.peers is not None:
        engine.peers = resolve(message.peers.factory)(engine, message.cache_secret, message.peers)
    if message.options.kv_events_config:
        from optkit.runtime.process.kv_publisher import publish

        publish(engine, message.options.kv_events_config)
    gc.collect()
    keep_freed_memory()
    gc.freeze()  # the model's objects live as long as the process: no collection needs to look at them
    took = time.monotonic() - start
    return engine, msgspec.structs.replace(engine.info(), load_seconds=took, pid=os.getpid())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m optkit.runtime.process.worker")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--factory", required=True, help="module:function that builds the engine")
    parser.add_argument("--artifact", default="", help="the artifact to come, where it is known")
    return parser.parse_args(argv)


@with_stack_room(OF_A_PROCESS)
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    leave_signals_to_parent()
    die_with_parent(args.parent)
    logs.configure(source="engine")
    sock, frames = socket.socket(fileno=args.fd), ipc.FrameReader()
    try:
        engine, info = load(args, sock, frames)
    except ParentGone:
        return 0
    except UserError as error:
        send(sock, ipc.Failed(error.what, error.where, error.fix, is_user_error=True))
        return 2
    except Exception as error:
        logger.exception("the engine could not be loaded")
        send(sock, ipc.Failed(f"{type(error).__name__}: {error}"))
        return 1
    try:
        send(sock, ipc.Ready(info))
        Worker(engine, sock, frames).serve()
    except ParentGone:
        return 0
    except EngineLost as lost:
        logger.error("the engine ends: %s", lost)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

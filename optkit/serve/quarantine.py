"""Quarantine: a request that ends the engine process is not let at it again and again.

Clients repeat what failed with 503, as they should, and so one request that crashes native code could take every new
engine down with it. Nobody can see from outside which of the sequences in flight it was, so it is found out:

1. all that the engine had begun when it died become *suspects*, each with the number of tokens it had by then;
2. a suspect that comes again is on *trial*: it waits until no other suspect runs and an engine is ready, then runs
   until it has got past that point and is cleared;
3. a suspect on trial that the engine had begun when it died again is *convicted*: refused, without a try, for
   ``BLOCK_SECONDS``.

A request that the engine had not begun (``ENGINE_GONE``) is no evidence: it neither becomes a suspect nor is convicted.
So a culprit costs two engines, and those that were only near it wait for each other once. Requests are told
apart by what they ask of the model, whoever asks; seeds do not count, since the choices of one request differ by them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar, cast

import msgspec

from optkit.runtime.process.client import ENGINE_DIED
from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput

log = logging.getLogger("optkit.serve")

QUARANTINED = "the request ended the engine twice"
BLOCK_SECONDS = 600.0
MAX_REMEMBERED = 4096  # requests; the oldest are forgotten

V = TypeVar("V")


class Quarantine:
    """Stands before an engine's ``generate``. Use it from one event loop.

    Args:
        until_ready: returns when an engine is ready or none will come; a trial begins after it.
    """

    def __init__(
        self, until_ready: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._until_ready, self._clock = until_ready, clock
        self._suspects = Remembered[int]()  # the tokens they had when the engine died
        self._convicts = Remembered[float]()  # until when
        self._trial = asyncio.Lock()

    async def generate(
        self, request: EngineRequest, source: Callable[[EngineRequest], AsyncIterator[TokenOutput]]
    ) -> AsyncIterator[TokenOutput]:
        """The outputs of ``source(request)``, or a refusal."""
        name = fingerprint(request)
        on_trial = await self._enter_trial(name)
        try:
            if self._is_convicted(name):
                yield refusal(request)
                return
            if on_trial:
                await self._until_ready()
            count = 0
            async with aclosing(cast(AsyncGenerator[TokenOutput, None], source(request))) as outputs:
                async for output in outputs:
                    count += len(output.token_ids)
                    if output.error == ENGINE_DIED:
                        self._was_there(name, count, on_trial)
                    elif on_trial and self._is_cleared(name, count, output):
                        on_trial = False
                        self._suspects.pop(name, None)
                        self._trial.release()
                    yield output
        finally:
            if on_trial:
                self._trial.release()

    async def _enter_trial(self, name: bytes) -> bool:
        """Wait for the turn of a suspect; False for a request that is none, or none any more."""
        if name not in self._suspects:
            return False
        await self._trial.acquire()
        if name in self._suspects:
            return True
        self._trial.release()
        return False

    def _is_convicted(self, name: bytes) -> bool:
        return self._clock() < self._convicts.get(name, 0.0)

    def _is_cleared(self, name: bytes, count: int, output: TokenOutput) -> bool:
        return output.finish_reason is not None or count > self._suspects.get(name, 0)

    def _was_there(self, name: bytes, count: int, on_trial: bool) -> None:
        """Record that the engine died after it had begun the request, alone of all suspects or not."""
        if not on_trial:
            self._suspects.remember(name, max(count, self._suspects.get(name, 0)))
            return
        self._suspects.pop(name, None)
        self._convicts.remember(name, self._clock() + BLOCK_SECONDS)
        log.error("request %s ended the engine twice: refused for %.0f s", name.hex()[:12], BLOCK_SECONDS)


class Remembered(dict[bytes, V]):
    """The latest ``MAX_REMEMBERED`` entries."""

    def remember(self, name: bytes, value: V) -> None:
        self[name] = value
        if len(self) > MAX_REMEMBERED:
            del self[next(iter(self))]


def fingerprint(request: EngineRequest) -> bytes:
    """What the request asks of the model."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return hashlib.sha256(msgspec.msgpack.encode((request.prompt_ids, sampling))).digest()


def refusal(request: EngineRequest) -> TokenOutput:
    name, reason = request.request_id, FinishReason.ERROR
    return TokenOutput(request_id=name, token_ids=(), finish_reason=reason, error=QUARANTINED)

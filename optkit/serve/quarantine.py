"""Quarantine: a poison request, which ends the engine process, must not end engine after engine.

Clients repeat a request that failed with 503, as they should. So a request with a crash of native code could end
every new engine. The crash itself does not show which of the running requests was the cause. The quarantine finds the
cause:

1. Each request begun before the engine's death becomes a *suspect*, with the number of tokens at the crash.
2. A repeated suspect is *probed*: the request waits until no second suspect runs and an engine is ready. The suspect
   is cleared at the end, or with more tokens than at the crash.
3. A probe during another death of the engine is *blocked*: refused for ``BLOCK_SECONDS``.

A request not yet begun (``ENGINE_GONE``) is no evidence, and becomes neither suspect nor blocked. So a poison request
costs two engines, and each neighbour waits once. Requests are compared by a fingerprint of prompt and sampling
parameters without the seed, because the choices of a request differ by seed. The fingerprint is computed only while
there are suspects or blocked requests; otherwise requests go straight to the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TypeVar, cast

import msgspec

from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, Casualty
from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput

log = logging.getLogger("optkit.serve")

QUARANTINED = "the request ended the engine twice"
BLOCK_SECONDS = 600.0
MAX_REMEMBERED = 4096  # requests; the oldest are forgotten

V = TypeVar("V")
Source = Callable[[EngineRequest], AsyncIterator[TokenOutput]]


class Quarantine:
    """Sends requests to the engine, at once or as a probe. Use it from a single event loop.

    Args:
        until_ready: returns when an engine is ready or none will come; a probe begins after the return.
    """

    def __init__(
        self, until_ready: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._until_ready, self._clock = until_ready, clock
        self._suspects = Remembered[int]()  # fingerprint -> tokens at the crash
        self._blocked = Remembered[float]()  # fingerprint -> end of the block
        self._probing = asyncio.Lock()
        self._probed: str | None = None  # request id of the probe

    def generate(self, request: EngineRequest, source: Source) -> AsyncIterator[TokenOutput]:
        """The outputs of ``source(request)``, or a refusal."""
        self._forget_expired()
        if not self._suspects and not self._blocked:
            return source(request)
        name = fingerprint(request)
        if name not in self._suspects and name not in self._blocked:
            return source(request)
        return self._probe(name, request, source)

    def record_death(self, casualties: Iterable[Casualty]) -> None:
        """Record the requests begun by the engine before its death. Called before the streams end."""
        for request, num_tokens in casualties:
            name = fingerprint(request)
            if request.request_id == self._probed:
                self._block(name)
            else:
                self._suspects.remember(name, max(num_tokens, self._suspects.get(name, 0)))

    async def _probe(
        self, name: bytes, request: EngineRequest, source: Source
    ) -> AsyncGenerator[TokenOutput, None]:
        await self._enter(name, request.request_id)
        try:
            if name in self._blocked:
                yield refusal(request)
                return
            if self._probed == request.request_id:
                await self._until_ready()
            count = request.continued
            async with aclosing(cast(AsyncGenerator[TokenOutput, None], source(request))) as outputs:
                async for output in outputs:
                    count += len(output.token_ids)
                    if self._probed == request.request_id and self._is_cleared(name, count, output):
                        self._suspects.pop(name, None)
                        self._leave(request.request_id)
                    yield output
        finally:
            self._leave(request.request_id)

    async def _enter(self, name: bytes, request_id: str) -> None:
        """Wait for the turn of a suspect; return at once for other requests."""
        if name not in self._suspects:
            return
        await self._probing.acquire()
        if name in self._suspects:
            self._probed = request_id
        else:
            self._probing.release()

    def _leave(self, request_id: str) -> None:
        """End the probe if ``request_id`` is the probe."""
        if self._probed == request_id:
            self._probed = None
            self._probing.release()

    def _is_cleared(self, name: bytes, count: int, output: TokenOutput) -> bool:
        if output.error in (ENGINE_DIED, ENGINE_GONE):
            return False
        return output.finish_reason is not None or count > self._suspects.get(name, 0)

    def _block(self, name: bytes) -> None:
        self._suspects.pop(name, None)
        self._blocked.remember(name, self._clock() + BLOCK_SECONDS)
        log.error("request %s ended the engine twice: refused for %.0f s", name.hex()[:12], BLOCK_SECONDS)

    def _forget_expired(self) -> None:
        """Drop expired blocks; the oldest block is the first entry."""
        while self._blocked and next(iter(self._blocked.values())) <= self._clock():
            del self._blocked[next(iter(self._blocked))]


class Remembered(dict[bytes, V]):
    """The latest ``MAX_REMEMBERED`` entries."""

    def remember(self, name: bytes, value: V) -> None:
        self.pop(name, None)  # the newest entry is the last
        self[name] = value
        if len(self) > MAX_REMEMBERED:
            del self[next(iter(self))]


def fingerprint(request: EngineRequest) -> bytes:
    """A hash of prompt and sampling parameters, without the seed; the same for an answer that goes on elsewhere."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    prompt = request.prompt_ids[: request.num_prompt]
    return hashlib.sha256(msgspec.msgpack.encode((prompt, sampling))).digest()


def refusal(request: EngineRequest) -> TokenOutput:
    """The end of a blocked request."""
    name, reason = request.request_id, FinishReason.ERROR
    return TokenOutput(request_id=name, token_ids=(), finish_reason=reason, error=QUARANTINED)

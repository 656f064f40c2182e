"""Engine supervisor: starts a new engine when the process of the last engine died or hangs.

An engine hangs without messages and without processor time, of its own and of its ranks: an engine in a long step stays
healthy. When the process dies, every open stream ends with an error at once (``EngineClient``). Until the new engine
is ready the server answers 503 with Retry-After and is not ready, but live: killing the server would only prolong the
outage. The first restart is immediate, each further restart within ``WINDOW_SECONDS`` waits twice as long as the last.
After ``MAX_RESTARTS`` restarts the supervisor gives up and the server ends, because trying again does not cure a
lasting fault. ``optkit.serve.quarantine`` finds a request behind the deaths.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from optkit.errors import UserError
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.client import EngineClient, EngineDied
from optkit.runtime.process.ipc import Embedded, PinList, Profiled, Reported
from optkit.runtime.report import Mark
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput
from optkit.serve.quarantine import Quarantine

log = logging.getLogger("optkit.serve")

MAX_RESTARTS, WINDOW_SECONDS = 3, 300.0
BACKOFF_SECONDS = 1.0  # before the second restart
CHECK_SECONDS = 1.0  # between two looks at the engine
HUNG_TIMEOUT_SECONDS = 10.0  # without processor time, after which a silent engine is taken for hung


class EngineSupervisor:
    """A sequence of ``EngineClient``s as an engine (``optkit.serve.engine_api.AsyncEngine``).

    Args:
        make_client: returns a client before its start; called again for each restart. A UserError is a failed restart.

    Attributes:
        num_restarts: engines started after the first.
        restarts: False once the server ends: a dead engine is not replaced.
        gave_up: the engine died too often and is not started again.
    """

    def __init__(self, make_client: Callable[[], EngineClient]) -> None:
        self._make_client = make_client
        self._quarantine = Quarantine(self._until_settled)
        self._client = self._new_client()
        self._crashes: deque[float] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # set for a moment after each attempt to restart
        self.num_restarts, self.restarts = 0, True
        self.gave_up = False

    async def start(self) -> EngineInfo:
        """Start the first engine; raises the errors of ``EngineClient.start``."""
        info = await self._client.start()
        self._watch = asyncio.create_task(self._keep_alive())
        return info

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        return self._quarantine.generate(request, self._ask)

    def _ask(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        """The outputs of the current engine."""
        return self._client.generate(request)

    def _new_client(self) -> EngineClient:
        client = self._make_client()
        client.on_death = self._quarantine.record_death
        return client

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        return await self._client.embed(prompts, pooling)

    async def pins(self, drop: str | None = None) -> PinList:
        """The pinned prefixes, after the pin ``drop`` has ended."""
        return await self._client.pins(drop)

    async def take_over(self, address: str, num_bytes: int) -> None:
        """Have the engine fetch the most recently used blocks of the leaving engine at ``address``."""
        await self._client.take_over(address, num_bytes)

    async def report(self, since: Mark) -> Reported:
        """Load, predicted times, and the changes of the cached blocks after ``since``."""
        return await self._client.report(since)

    async def start_profile(self, steps: int) -> Profiled:
        return await self._client.start_profile(steps)

    async def stop_profile(self, directory: str) -> Profiled:
        return await self._client.stop_profile(directory)

    async def reset_prefix_cache(self) -> None:
        await self._client.reset_prefix_cache()

    @property
    def stats(self) -> EngineStats:
        return self._client.stats

    @property
    def info(self) -> EngineInfo | None:
        return self._client.info

    @property
    def pid(self) -> int | None:
        return self._client.pid

    @property
    def is_healthy(self) -> bool:
        """The engine process has loaded and lives; a step may take minutes."""
        return self._client.is_healthy

    @property
    def is_restarting(self) -> bool:
        """The engine is gone, and a new engine is being started."""
        return not self._client.is_healthy and self.restarts and not self.gave_up and self._watches

    @property
    def _watches(self) -> bool:
        return self._watch is not None and not self._watch.done()

    async def wait_gave_up(self) -> None:
        """Return when there is no engine and none will come."""
        if self._watch is not None:
            await asyncio.wait([self._watch])

    def kill(self) -> None:
        """End the engine process without waiting for the step; ``stop`` follows."""
        self._client.kill(wanted=True)

    async def stop(self) -> None:
        """End the engine and the supervision."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        self._wake()
        await self._client.stop()

    async def _until_settled(self) -> None:
        """Return when an engine is ready, or when none will come."""
        while self.is_restarting:
            await self._settled.wait()

    def _wake(self) -> None:
        """Let ``_until_settled`` look again."""
        self._settled.set()
        self._settled.clear()

    async def _keep_alive(self) -> None:
        while True:
            await self._until_dead()
            if not self.restarts:
                return
            delay = self._next_delay()
            if delay is None:
                log.error("the engine died %d times in %d s: giving up", len(self._crashes), WINDOW_SECONDS)
                self.gave_up = True
                self._wake()
                return
            log.error("the engine process is gone; starting another one in %.0f s", delay)
            await asyncio.sleep(delay)
            await self._restart()
            self._wake()

    async def _until_dead(self) -> None:
        """Return when the engine's process has ended; end a hanging process.

        Silence alone is no sign of a hang: a part of a step may take minutes, but uses the processor.
        """
        client, still_since, used = self._client, 0.0, -1.0
        dead = asyncio.create_task(client.wait_dead())
        try:
            while not (await asyncio.wait([dead], timeout=CHECK_SECONDS))[0]:
                now, before = time.monotonic(), used
                used = cpu_seconds(client.pid)
                if not client.is_silent or used != before:
                    still_since = now
                elif now - still_since > HUNG_TIMEOUT_SECONDS:
                    log.error("no sign of life from the engine: ending it")
                    client.kill()
        finally:
            dead.cancel()

    def _next_delay(self) -> float | None:
        """Seconds until the next start, None if there have been too many."""
        now = time.monotonic()
        while self._crashes and now - self._crashes[0] > WINDOW_SECONDS:
            self._crashes.popleft()
        self._crashes.append(now)
        earlier = len(self._crashes) - 1
        if earlier >= MAX_RESTARTS:
            return None
        return BACKOFF_SECONDS * 2 ** (earlier - 1) if earlier else 0.0

    async def _restart(self) -> None:
        """Start a new engine; an engine that does not start counts as dead."""
        await self._client.stop()
        start = time.monotonic()
        try:
            self._client = self._new_client()
            await self._client.start()
        except (EngineDied, UserError, OSError) as error:
            log.error("the engine did not come up again: %s", error)
            return
        self.num_restarts += 1
        log.warning("the engine is back after %.1f s", time.monotonic() - start)


def cpu_seconds(pid: int | None) -> float:
    """Processor time of a process and of its children, the ranks, so far.

    NaN, which equals nothing, without /proc (not Linux).
    """
    try:
        lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
        pids = [str(pid), *(child for found in lists for child in found.split())]
        stats = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in pids]
    except OSError:
        return math.nan
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

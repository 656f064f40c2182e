"""Fleets in a single process: replicas on scripted engines, behind links as between processes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from optkit.fleet.engine import FleetEngine
from optkit.fleet.local import LocalReplica
from optkit.fleet.member import Member
from optkit.fleet.remote_replica import RemoteReplica
from optkit.fleet.replica import Mark, ReplicaGone
from optkit.fleet.served_replica import ServedReplica
from optkit.runtime.process.ipc import Reported
from optkit.runtime.report import EngineReport
from optkit.runtime.types import EngineRequest, EngineStats, SamplingParams, TokenOutput
from tests.support.serve_fakes import FakeEngine


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """``test`` on a new event loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


def ask(name: str = "a", prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 50) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival=0.0)


async def tokens_of(outputs: AsyncIterator[TokenOutput]) -> list[int]:
    """The tokens of an answer, without a stop token; a failed answer is an error."""
    found: list[int] = []
    async for output in outputs:
        assert output.error is None, output.error
        found += output.token_ids
    return found


class CuttableStub:
    """The calls of ``served``, as from another process, until ``cut``; a link is in memory.

    Attributes:
        calls: the names of all calls.
    """

    def __init__(self, served: ServedReplica) -> None:
        self.served, self.is_cut = served, asyncio.Event()
        self.calls: list[str] = []

    def cut(self) -> None:
        self.is_cut.set()

    def restore(self) -> None:
        self.is_cut = asyncio.Event()

    async def link(self) -> InMemoryLink:
        if self.is_cut.is_set():
            raise ReplicaGone("the connection broke", was_begun=False)
        self.calls.append("link")
        name = str(len(self.calls))
        await self.served.open(name)
        return InMemoryLink(self, name)

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: object) -> object:
            self.calls.append(method)
            return await self.until_cut(getattr(self.served, method)(*arguments))

        return call

    async def until_cut(self, call: Awaitable[Any]) -> Any:
        """The result of ``call``, unless cut first."""
        answer, cut = asyncio.ensure_future(call), asyncio.ensure_future(self.is_cut.wait())
        try:
            await asyncio.wait([answer, cut], return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                raise ReplicaGone("the connection broke", was_begun=False)
            return answer.result()
        finally:
            answer.cancel()
            cut.cancel()


class InMemoryLink:
    """A link to ``stub.served`` (``optkit.fleet.wire.Link``)."""

    def __init__(self, stub: CuttableStub, name: str) -> None:
        self._stub, self._name = stub, name
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, sent: bytes) -> None:
        self._begin(self._stub.served.submit(self._name, sent))

    def abort(self, request_id: str) -> None:
        self._begin(self._stub.served.abort(self._name, request_id))

    async def take(self) -> bytes:
        self._stub.calls.append("take")
        return bytes(await self._stub.until_cut(self._stub.served.take(self._name)))

    def close(self) -> None:
        self._stub.served.close(self._name)

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        if self._stub.is_cut.is_set():
            raise ReplicaGone("the connection broke", was_begun=False)
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ChangingMembers:
    """Replicas, added and taken away by a test."""

    def __init__(self, *members: Member) -> None:
        self.present = list(members)
        self._changed = asyncio.Event()

    def set(self, *members: Member) -> None:
        self.present = list(members)
        self._changed.set()

    async def changes(self) -> AsyncIterator[Sequence[Member]]:
        while True:
            yield list(self.present)
            await self._changed.wait()
            self._changed.clear()


class Reporting:
    """``engine`` with reports of the numbers in the stats."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def report(self, since: Mark) -> Reported:
        if not self._engine.is_healthy:
            return Reported("report", error="gone")
        stats: EngineStats = self._engine.stats
        counts = {"num_running": stats.num_running, "num_waiting": stats.num_waiting}
        queue = 0.01 * sum(counts.values())
        return Reported("report", EngineReport(**counts, queue_seconds=queue, prefill_seconds=(0.01,) * 5))


def local(engine: Any, name: str) -> LocalReplica:
    """A replica on a scripted engine."""
    return LocalReplica(Reporting(engine), name)


@asynccontextmanager
async def fleet(*engines: Any, **options: Any) -> AsyncIterator[FleetEngine]:
    """A started fleet with a local replica for each engine, named 0, 1, ..."""
    members = [local(engine, str(index)) for index, engine in enumerate(engines)]
    async with fleet_of(ChangingMembers(*members), **options) as engine:
        yield engine


@asynccontextmanager
async def fleet_of(members: ChangingMembers, **options: Any) -> AsyncIterator[FleetEngine]:
    """A started fleet with reports of all replicas."""
    engine = FleetEngine(members, **options)
    starting = asyncio.create_task(engine.start(10.0))
    try:
        await soon(lambda: len(engine.reports) == len(members.present))
        yield engine
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.stop()


@asynccontextmanager
async def linked(engine: FakeEngine) -> AsyncIterator[tuple[RemoteReplica, CuttableStub]]:
    """A replica on ``engine`` behind a link, and the stub to cut."""
    stub = CuttableStub(ServedReplica(local(engine, "far")))
    remote = RemoteReplica(stub, "far")
    await soon(lambda: "take" in stub.calls)
    try:
        yield remote, stub
    finally:
        await remote.close()


async def soon(condition: Any) -> None:
    """Return when ``condition()`` holds, within seconds."""
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.002)


async def within(awaitable: Awaitable[Any]) -> Any:
    """The result, within seconds."""
    async with asyncio.timeout(20.0):
        return await awaitable

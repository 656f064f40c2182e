"""The server's end of a link: a replica in another process (``optkit.fleet.member.Member``).

A task takes the outputs of all requests and hands each to the right stream. When a call fails, the replica or the way
is gone: all open streams end with ReplicaGone, and the task tries a new link, since the way may come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from optkit.fleet import wire
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import Embedded, PinList, Profiled
from optkit.runtime.types import TokenOutput

log = logging.getLogger("optkit.fleet")

RETRY_SECONDS = 0.25  # between two links
NOT_LINKED = "there is no link to the replica"
CLOSED = "the replica has left the fleet"


@dataclass(eq=False)
class _Stream:
    """Events of a request, waiting for the reader."""

    events: asyncio.Queue[TokenOutput | ReplicaGone] = field(default_factory=asyncio.Queue)
    has_output: bool = False


class RemoteReplica:
    """The replica behind ``stub``. Construction and calls belong to a single event loop."""

    def __init__(self, stub: wire.Stub, replica_id: str) -> None:
        self._stub, self.replica_id = stub, replica_id
        self._streams: dict[str, _Stream] = {}
        self._link: wire.Link | None = None
        self._taking = asyncio.create_task(self._take())

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        name = work.request.request_id
        if name in self._streams:
            raise ValueError(f"a request with the id {name!r} is being served")
        if self._link is None:
            raise self._gone(NOT_LINKED)
        stream, link = _Stream(), self._link
        self._streams[name] = stream
        is_done = False
        try:
            link.submit(wire.encode(wire.Sent.now(work)))
            while not is_done:
                event = await stream.events.get()
                if isinstance(event, ReplicaGone):
                    is_done = True
                    raise event
                is_done = event.finish_reason is not None
                yield event
        except ReplicaGone:
            is_done = True
            raise
        finally:
            del self._streams[name]
            if not is_done:
                with suppress(ReplicaGone):  # a lost replica needs no word
                    link.abort(name)

    async def _take(self) -> None:
        """Hand out the events of link after link."""
        while True:
            link: wire.Link | None = None
            try:
                link = self._link = await self._stub.link()
                while True:
                    answer = await link.take()
                    if answer:
                        self._hand_out(wire.events.decode(answer))
            except ReplicaGone as gone:
                self._break(str(gone))
            finally:
                if link is not None:
                    link.close()
            await asyncio.sleep(RETRY_SECONDS)

    def _hand_out(self, events: wire.Events) -> None:
        for event in events:
            name = event.request_id if isinstance(event, wire.Gone) else event.output.request_id
            stream = self._streams.get(name)
            if stream is None:
                continue  # aborted
            if isinstance(event, wire.Gone):
                gone = ReplicaGone(event.reason, was_begun=event.was_begun, replica_id=self.replica_id)
                stream.events.put_nowait(gone)
            else:
                stream.has_output = True
                stream.events.put_nowait(event.output)

    def _break(self, reason: str) -> None:
        """End all streams. A request without an output may have been begun or not, and counts as not begun."""
        self._link = None
        for stream in self._streams.values():
            stream.events.put_nowait(self._gone(reason, was_begun=stream.has_output))

    def _gone(self, reason: str, *, was_begun: bool = False) -> ReplicaGone:
        return ReplicaGone(reason, was_begun=was_begun, replica_id=self.replica_id)

    async def report(self, since: Mark) -> ReplicaReport:
        found = wire.report.decode(await self._stub.report(wire.encode(since)))
        if self._link is None:
            raise self._gone(NOT_LINKED)
        return found

    async def drain(self) -> None:
        await self._stub.drain()

    async def engine_info(self) -> EngineInfo | None:
        return wire.info.decode(await self._stub.engine_info())

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        call = wire.EmbedCall(tuple(map(tuple, prompts)), pooling)
        return wire.embedded.decode(await self._stub.embed(wire.encode(call)))

    async def pins(self, drop: str | None = None) -> PinList:
        return wire.pins.decode(await self._stub.pins(drop))

    async def reset_prefix_cache(self) -> None:
        await self._stub.reset_prefix_cache()

    async def take_over(self, address: str, num_bytes: int) -> None:
        await self._stub.take_over(address, num_bytes)

    async def start_profile(self, steps: int) -> Profiled:
        return wire.profiled.decode(await self._stub.start_profile(steps))

    async def stop_profile(self, directory: str) -> Profiled:
        return wire.profiled.decode(await self._stub.stop_profile(directory))

    async def close(self) -> None:
        self._taking.cancel()
        await asyncio.gather(self._taking, return_exceptions=True)
        self._break(CLOSED)

"""The replica's end of links: runs requests of any number of servers and queues the outputs for each server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from optkit.fleet import wire
from optkit.fleet.member import Member
from optkit.fleet.replica import ReplicaGone
from optkit.runtime.types import FinishReason, TokenOutput

log = logging.getLogger("optkit.fleet")

IDLE_SECONDS = 1.0  # of ``take`` without outputs
DRAIN_SECONDS = 5.0  # for the last outputs to be taken
FAILED = "the replica failed"
NO_LINK = "the link is closed"


@dataclass(eq=False)
class _Link:
    """Outputs for a server, and the tasks of requests by request id."""

    events: list[wire.Output | wire.Gone] = field(default_factory=list)
    has_events: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def put(self, event: wire.Output | wire.Gone) -> None:
        self.events.append(event)
        self.has_events.set()

    def close(self) -> None:
        for task in self.requests.values():
            task.cancel()
        self.has_events.set()  # a waiting ``take`` looks again


class ServedReplica:
    """``replica`` for servers in other processes; arguments and answers are bytes (``optkit.fleet.wire``)."""

    def __init__(self, replica: Member) -> None:
        self._replica = replica
        self._links: dict[str, _Link] = {}

    async def open(self, link: str) -> None:
        """Begin the link."""
        self._links[link] = _Link()

    async def submit(self, link: str, sent: bytes) -> None:
        """Begin a request; outputs go to the link. Raises ReplicaGone for a closed link."""
        found = self._link(link)
        work = wire.sent.decode(sent).received()
        task = asyncio.create_task(self._run(found, work))
        found.requests[work.request.request_id] = task

    async def abort(self, link: str, request_id: str) -> None:
        """End a request without a further output; an ended request is ignored."""
        found = self._links.get(link)
        task = found.requests.get(request_id) if found else None
        if task is not None:
            task.cancel()

    async def take(self, link: str) -> bytes:
        """All events since the last call, or NOTHING when none came for IDLE_SECONDS.

        Raises ReplicaGone for a closed link, whose requests have been aborted.
        """
        found = self._link(link)
        if not found.events:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    await found.has_events.wait()
            except TimeoutError:
                return wire.NOTHING
        events, found.events = found.events, []
        found.has_events.clear()
        return wire.encode(tuple(events))

    def close(self, link: str) -> None:
        """End the link of a lost server: the requests are aborted."""
        found = self._links.pop(link, None)
        if found is not None:
            found.close()

    async def report(self, since: bytes) -> bytes:
        return wire.encode(await self._replica.report(wire.mark.decode(since)))

    async def engine_info(self) -> bytes:
        return wire.encode(await self._replica.engine_info())

    async def embed(self, call: bytes) -> bytes:
        asked = wire.embed_call.decode(call)
        return wire.encode(await self._replica.embed(asked.prompts, asked.pooling))

    async def pins(self, drop: str | None) -> bytes:
        return wire.encode(await self._replica.pins(drop))

    async def reset_prefix_cache(self) -> None:
        await self._replica.reset_prefix_cache()

    async def take_over(self, address: str, num_bytes: int) -> None:
        await self._replica.take_over(address, num_bytes)

    async def start_profile(self, steps: int) -> bytes:
        return wire.encode(await self._replica.start_profile(steps))

    async def stop_profile(self, directory: str) -> bytes:
        return wire.encode(await self._replica.stop_profile(directory))

    async def drain(self) -> None:
        """Take no new requests; return when the last output has been taken."""
        await self._replica.drain()
        deadline = time.monotonic() + DRAIN_SECONDS
        while any(link.events for link in self._links.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _link(self, name: str) -> _Link:
        if name not in self._links:
            raise ReplicaGone(NO_LINK, was_begun=False, replica_id=self._replica.replica_id)
        return self._links[name]

    async def _run(self, link: _Link, work: wire.Work) -> None:
        """Put the outputs of a request on the link."""
        name = work.request.request_id
        try:
            stream = cast(AsyncGenerator[TokenOutput, None], self._replica.generate(work))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    link.put(wire.Output(output))
        except ReplicaGone as gone:
            link.put(wire.Gone(name, str(gone), gone.was_begun))
        except Exception:
            log.exception("request %s failed", name)
            link.put(
                wire.Output(
                    TokenOutput(request_id=name, token_ids=(), finish_reason=FinishReason.ERROR, error=FAILED)
                )
            )
        finally:
            if link.requests.get(name) is asyncio.current_task():  # else the id is in use again
                del link.requests[name]

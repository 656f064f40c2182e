"""The end of the HTTP side: requests in flight get some seconds to finish, then the rest are cut.

uvicorn cancels slow tasks: the log gets an ERROR and a stack trace for each, and a client without a
byte yet gets 500. Here a cut is the expiry of each request's own time limit, so every request ends as after
``--request-timeout``, with the error ``server_shutdown``, and the log gets a single line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn

from optkit.serve.http.errors import ApiError

log = logging.getLogger("optkit.serve")

FINAL_ERROR_TIMEOUT_SECONDS = 1.0  # for errors to clients that may not read
GOODBYE_SECONDS = 1.0  # for the end of TLS by the client, which an idle client may never send


def shutting_down() -> ApiError:
    """The answer to a late or cut request."""
    return ApiError("the server is shutting down", code="server_shutdown", status=503, retry_after=5)


class RequestsInFlight:
    """The time limits of the requests in flight. Use it from a single event loop.

    Attributes:
        is_cut: requests in flight have been ended, and none may begin.
    """

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self.is_cut = False

    @asynccontextmanager
    async def limit(self, deadline: float | None) -> AsyncIterator[None]:
        """Run the body until ``deadline`` (time of the event loop; None is no limit) or ``cut``: TimeoutError."""
        async with asyncio.timeout_at(0.0 if self.is_cut else deadline) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def cut(self) -> int:
        """End all requests in flight; gives how many there were."""
        self.is_cut = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # in the past
        return len(self._limits)


class DrainingServer(uvicorn.Server):
    """uvicorn without its signal handlers, with its own way to end slow requests.

    Args:
        requests: in flight.
        drain_seconds: time for requests in flight once the server ends.
    """

    def __init__(self, config: uvicorn.Config, requests: RequestsInFlight, drain_seconds: float) -> None:
        super().__init__(config)
        self.requests, self.drain_seconds = requests, drain_seconds
        self._cut = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    def cut(self) -> None:
        """End the requests in flight now."""
        self._cut.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait for requests in flight, cut the rest after ``drain_seconds``."""
        ending = [asyncio.create_task(work) for work in (self._cut_late(), self._cut_closed())]
        try:
            await super().shutdown(sockets)
        finally:
            for task in ending:
                task.cancel()

    async def _cut_late(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cut.wait(), self.drain_seconds)
        count = self.requests.cut()
        if count:
            log.warning("shutting down: %d requests in flight were cut", count)
        await self._send_final_errors()
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def _cut_closed(self) -> None:
        """Cut connections that were closed, have nothing to send, and wait for the client's end of TLS."""
        earlier: set[asyncio.Transport] = set()
        while True:
            await asyncio.sleep(GOODBYE_SECONDS)
            transports = [connection.transport for connection in self.server_state.connections]
            closed = {one for one in transports if one.is_closing() and not one.get_write_buffer_size()}  # type: ignore[union-attr]
            for transport in closed & earlier:
                transport.abort()
            earlier = closed

    async def _send_final_errors(self) -> None:
        """Wait until the errors are on their way, or for ``FINAL_ERROR_TIMEOUT_SECONDS``."""
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FINAL_ERROR_TIMEOUT_SECONDS)

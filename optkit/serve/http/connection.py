"""uvicorn's connection with a limit on the time of a request's headers, and with joined writes (``joined_writes``).

uvicorn limits the idle time between two requests, and the application the time of a body (``body``). Neither
sees a client that connects and sends headers at a byte a minute, or none: each connection holds a file
descriptor, and some thousands lock out all clients (slowloris).
"""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from optkit.serve.http.joined_writes import JoinedWrites

HEADER_SECONDS = 10.0
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    """Ends with 408 when headers take longer than ``HEADER_SECONDS`` from the connection or the first byte."""

    _deadline: asyncio.TimerHandle | None = None
    _writes: JoinedWrites

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = JoinedWrites(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._writes))
        self._expect_headers()

    def eof_received(self) -> None:
        """Writes what waits: the loop closes the transport next."""
        self._writes.flush()
        super().eof_received()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._forget()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._forget()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()

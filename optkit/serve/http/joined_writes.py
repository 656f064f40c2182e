"""A transport that sends what is written in one turn of the event loop in one piece.

uvicorn writes the head of a response and each part of its body on their own, and each write wakes the client up. A
client on the server's machine then takes a core between the head and the first token, while the next step of the engine
needs the cores: the token waits for milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

MOST_HELD = 64 * 1024  # bytes; more is written at once, and the transport can tell its protocol to pause


class JoinedWrites:
    """The transport ``transport``, whose writes wait for the end of the turn of ``loop``.

    Code that works long without ``await`` after a write delays the bytes. The event loop closes ``transport`` by itself
    after the last byte of a client: the protocol calls ``flush`` before.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._num_held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep a copy of ``data``. Raises TypeError for other types than bytes, as the transport does."""
        copy = bytes(memoryview(data))
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(copy)
        self._num_held += len(copy)
        if self._num_held > MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Write the waiting bytes now; nothing on a closed transport."""
        held, self._held, self._num_held = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        for part in parts:
            self.write(part)

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

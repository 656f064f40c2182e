"""A transport that sends what is written in one turn of the event loop in one piece.

uvicorn writes the head of a response and each part of its body on their own, and each write wakes the client up. A
client on the server's machine then takes a core between the head and the first token, while the next step of the engine
needs the cores: the token waits for milliseconds.
"""

from __future__ import annotations

import asyncio
from typing import Any

MOST_HELD = 64 * 1024  # bytes; more is written at once, and the transport can tell its protocol to pause


class JoinedWrites:
    """The transport ``transport``, whose writes wait for the end of the turn of ``loop``.

    Code that works long without ``await`` after a write delays it. ``flush`` is for what the loop itself closes: it
    closes ``transport``, without this object, when a client has sent its last byte.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._num_held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keeps a copy of ``data``. Raises TypeError where it is no bytes, as the transport does."""
        copy = bytes(memoryview(data))
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(copy)
        self._num_held += len(copy)
        if self._num_held > MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Writes now what waits."""
        if self._held:
            held, self._held, self._num_held = self._held, [], 0
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()

"""Single flight: a single computation for all clients with the same request.

The application runs in a task apart from the clients. Each client gets the messages so far and then new messages at
once, so streams stay streams. The application sees a disconnect only when the last client has left, so a client may
leave without cost to the rest.

All messages are held until the end, within a bound on memory. An answer beyond the bound takes no further clients and
is not kept; from there on the application waits for the slowest client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from optkit.serve.app_state import is_complete
from optkit.serve.cache.store import Header, Room

MESSAGE_BYTES = 320  # of a message beside its body, about


@dataclass(eq=False)
class _Reader:
    """A client; ``position`` is the number of messages sent so far."""

    position: int = 0


class Flight:
    """A run of ``app`` for a request with ``body``; begins at once.

    Args:
        room: for the messages.
        on_end: called with the flight at the end of the run.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, body: bytes, room: Room, on_end: Callable[[Flight], None]
    ) -> None:
        self._scope = {**scope, "state": dict(scope.get("state", {}))}
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._messages: deque[Message] = deque()
        self._num_dropped = 0  # messages before the first of ``_messages``
        self._readers: list[_Reader] = []
        self._room, self._is_whole = room, True
        self._abandoned, self._news = asyncio.Event(), asyncio.Event()
        self._on_end = on_end
        self._task = asyncio.create_task(self._run(app))
        self._task.add_done_callback(self._end)

    @property
    def is_open(self) -> bool:
        """True while further clients can get the answer: all messages are held, and a client is left."""
        return self._is_whole and not self._abandoned.is_set()

    @property
    def answer(self) -> tuple[tuple[Header, ...], bytes] | None:
        """Headers and body of a whole answer with status 200; None for anything else."""
        if not self.is_open or not self._messages or not is_complete(self._scope):
            return None
        start, *rest = self._messages
        if start["status"] != 200:
            return None
        return tuple(start["headers"]), b"".join(message.get("body", b"") for message in rest)

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[AsyncIterator[Message]]:
        """A further client, with the messages of the answer from the first.

        The iterator raises the exception of the application after the last message. The end of the context of the
        last client ends the computation.
        """
        reader = _Reader()
        self._readers.append(reader)
        try:
            yield self._messages_of(reader)
        finally:
            self._readers.remove(reader)
            self._drop_read()
            if not self._readers and not self._task.done():
                self._abandoned.set()
                await asyncio.wait({self._task})

    async def _messages_of(self, reader: _Reader) -> AsyncIterator[Message]:
        while True:
            while reader.position < self._num_dropped + len(self._messages):
                message = self._messages[reader.position - self._num_dropped]
                if self._is_whole and is_last(message):  # the answer is kept before a client has its end
                    await asyncio.wait({self._task})
                yield message
                reader.position += 1
                self._drop_read()
            if self._task.done():
                self._task.result()
                return
            await self._news.wait()

    def _drop_read(self) -> None:
        """Forget the messages already read by all clients, of an answer too large to hold."""
        if self._is_whole:
            return
        first = min((reader.position for reader in self._readers), default=self._num_dropped)
        while self._num_dropped < first:
            self._messages.popleft()
            self._num_dropped += 1
        self._wake()

    async def _run(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # is raised for the clients, if one is left
        self._room.close()
        self._on_end(self)
        self._wake()

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._abandoned.is_set():  # the application hears of it soon
            return await asyncio.sleep(0)
        if self._is_whole:
            self._is_whole = self._room.grow(MESSAGE_BYTES + len(message.get("body", b"")))
        self._messages.append(message)
        self._wake()
        while not self._is_whole and self._messages and self._readers:
            self._drop_read()
            if self._messages:
                await self._news.wait()
        return None

    def _wake(self) -> None:
        """Let the application and every client look for changes."""
        self._news.set()
        self._news.clear()


def is_last(message: Message) -> bool:
    """True for the last message of an answer."""
    return bool(message["type"] == "http.response.body" and not message.get("more_body"))

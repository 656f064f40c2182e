"""One computation of an answer, sent to every client that asks for it meanwhile.

The application runs in a task apart from the clients. Each client gets the messages so far and then the new ones as
they come, so streams stay streams. The application sees a disconnect only when the last client has left: one that
leaves does not cost the others their answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp, Message, Scope

from optkit.serve.app_state import is_complete


class Flight:
    """A run of ``app`` for a request with ``body``; begins at once.

    Args:
        landed: called with the flight at the end of the run.
    """

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, landed: Callable[[Flight], None]) -> None:
        self._scope = {**scope, "state": dict(scope.get("state", {}))}
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._messages: list[Message] = []
        self._num_clients = 0
        self._abandoned, self._news = asyncio.Event(), asyncio.Event()
        self._landed = landed
        self._task = asyncio.create_task(self._run(app))
        self._task.add_done_callback(self._end)

    async def follow(self) -> AsyncIterator[Message]:
        """The messages of the answer, from the first; raises the exception of the application after the last.

        Closing the last iterator ends the computation.
        """
        self._num_clients += 1
        try:
            sent = 0
            while True:
                while sent < len(self._messages):
                    sent += 1
                    yield self._messages[sent - 1]
                if self._task.done():
                    self._task.result()
                    return
                await self._news.wait()
        finally:
            self._num_clients -= 1
            if not self._num_clients and not self._task.done():
                self._abandoned.set()
                await asyncio.wait({self._task})

    @property
    def is_abandoned(self) -> bool:
        """True when the last client has left before the end."""
        return self._abandoned.is_set()

    @property
    def answer(self) -> tuple[tuple[tuple[bytes, bytes], ...], bytes] | None:
        """Headers and body of a whole answer with status 200; None for anything else."""
        if not self._messages or not is_complete(self._scope):
            return None
        start, *rest = self._messages
        if start["status"] != 200:
            return None
        return tuple(start["headers"]), b"".join(message.get("body", b"") for message in rest)

    async def _run(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # is raised by ``follow``, if a client is left
        self._landed(self)
        self._wake()

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        """Let every client look for new messages."""
        self._news.set()
        self._news.clear()

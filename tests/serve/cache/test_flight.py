"""One computation for several clients: late ones, slow ones, ones that leave, errors, and answers too large to hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from optkit.serve.app_state import mark_complete
from optkit.serve.cache.flight import MESSAGE_BYTES, Flight
from optkit.serve.cache.store import ResponseStore, Room

SCOPE: Scope = {"type": "http", "state": {"tenant": "t"}}


class App:
    """Sends the body in pieces, each when ``gate`` is opened; then fails with ``error`` or marks the end."""

    def __init__(self, error: Exception | None = None, pieces: int = 2, size: int = 1) -> None:
        self.gate, self.error = asyncio.Semaphore(0), error
        self.pieces, self.num_sent = [bytes([65 + i % 26]) * size for i in range(pieces)], 0
        self.ended = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"body" and scope["state"]["tenant"] == "t"
        work = asyncio.create_task(self._send(send))
        watch = asyncio.create_task(receive())  # type: ignore[arg-type]
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        self.ended = "done" if work.done() else "left"
        work.cancel()
        watch.cancel()
        if work.done():
            work.result()
            mark_complete(scope)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for piece in self.pieces:
            await self.gate.acquire()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.num_sent += 1
        if self.error:
            raise self.error
        await send({"type": "http.response.body", "body": b"!"})

    def open(self, count: int = 2) -> None:
        for _ in range(count):
            self.gate.release()


class Case:
    """A flight of ``app`` in a store of ``max_bytes``.

    Attributes:
        ended: the flight, after its end.
    """

    def __init__(self, app: App, max_bytes: int = 2**20) -> None:
        self.store, self.ended = ResponseStore(max_bytes), list[Flight]()
        self.flight = Flight(app, SCOPE, b"body", Room(self.store), self.ended.append)

    async def body(self, seconds: float = 0.0) -> bytes:
        """The body that a client gets who takes ``seconds`` for each message."""
        found = b""
        async with self.flight.joined() as messages:
            async for message in messages:
                found += message.get("body", b"")
                await asyncio.sleep(seconds)
        return found


def test_clients_get_the_same_bytes_whenever_they_come() -> None:
    async def scenario() -> None:
        app = App()
        case = Case(app)
        first = asyncio.create_task(case.body())
        await asyncio.sleep(0.01)
        app.open(1)
        second = asyncio.create_task(case.body())
        await asyncio.sleep(0.01)
        assert case.flight.is_open and case.flight.answer is None and not case.ended
        assert case.store.num_bytes == 2 * MESSAGE_BYTES + 1
        app.open(1)
        assert await first == await second == b"AB!"
        assert await case.body() == b"AB!"  # after the end
        assert case.ended == [case.flight] and case.flight.answer == (((b"a", b"b"),), b"AB!")
        assert case.store.num_bytes == 0 and "answer_is_complete" not in SCOPE["state"]

    asyncio.run(scenario())


@pytest.mark.parametrize("everyone", [False, True])
def test_one_client_that_leaves_costs_the_others_nothing_and_the_last_ends_the_work(everyone: bool) -> None:
    """Also when the first, who began the computation, leaves."""

    async def scenario() -> None:
        app = App()
        case = Case(app)
        clients = [asyncio.create_task(case.body()) for _ in range(2)]
        await asyncio.sleep(0.01)
        for client in clients if everyone else clients[:1]:
            client.cancel()
        await asyncio.sleep(0.01)
        app.open()
        found = await asyncio.gather(*clients, return_exceptions=True)
        assert case.flight.is_open != everyone and case.ended == [case.flight]
        assert app.ended == ("left" if everyone else "done")
        assert everyone or found[1] == b"AB!"
        assert (case.flight.answer is None) == everyone and case.store.num_bytes == 0

    asyncio.run(scenario())


def test_an_exception_reaches_every_client_after_what_was_sent() -> None:
    async def scenario() -> None:
        app = App(RuntimeError("injected"))
        case = Case(app)
        app.open()

        async def collect(messages: AsyncIterator[Any]) -> list[Any]:
            found = []
            with pytest.raises(RuntimeError, match="injected"):
                async for message in messages:
                    found.append(message.get("body"))
            return found

        async with case.flight.joined() as one, case.flight.joined() as other:
            assert await asyncio.gather(collect(one), collect(other)) == [[None, b"A", b"B"]] * 2
        assert case.flight.answer is None and case.ended

    asyncio.run(scenario())


def test_an_answer_too_large_to_hold_waits_for_its_clients_and_takes_no_others() -> None:
    """Twenty pieces, room for about six: two clients get all of them, the slower one sets the pace."""

    async def scenario() -> None:
        app = App(pieces=20, size=1000)
        case = Case(app, max_bytes=4 * 8000)
        app.open(20)
        slow, fast = asyncio.create_task(case.body(0.005)), asyncio.create_task(case.body())
        peak = 0
        while not case.ended:
            await asyncio.sleep(0.001)
            peak = max(peak, case.store.num_bytes)
            assert len(case.flight._messages) <= 8
        whole = b"".join(app.pieces) + b"!"
        assert await slow == await fast == whole and len(whole) > 20_000
        assert not case.flight.is_open and case.flight.answer is None
        assert 4000 < peak <= 8000 and case.store.num_bytes == 0

    asyncio.run(scenario())


def test_the_only_reader_of_a_large_answer_may_leave() -> None:
    async def scenario() -> None:
        app = App(pieces=20, size=1000)
        case = Case(app, max_bytes=4 * 3000)
        app.open(20)
        client = asyncio.create_task(case.body(100))
        await asyncio.sleep(0.01)
        assert 0 < app.num_sent < 6
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        assert app.ended == "left" and case.ended and case.store.num_bytes == 0

    asyncio.run(scenario())

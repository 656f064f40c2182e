"""One computation for several clients: late ones, slow ones, ones that leave, and errors."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from optkit.serve.app_state import mark_complete
from optkit.serve.cache.flight import Flight

SCOPE: Scope = {"type": "http", "state": {"tenant": "t"}}


class App:
    """Sends the body in pieces, each when ``gate`` is opened; then fails with ``error`` or marks the end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self.error = asyncio.Semaphore(0), error
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
        for piece in (b"x", b"y"):
            await self.gate.acquire()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self.error:
            raise self.error
        await send({"type": "http.response.body", "body": b"z"})


async def body_of(flight: Flight) -> bytes:
    return b"".join([message.get("body", b"") async for message in flight.follow()])


def test_clients_get_the_same_bytes_whenever_they_come() -> None:
    async def scenario() -> None:
        app, landed = App(), list[Flight]()
        flight = Flight(app, SCOPE, b"body", landed.append)
        first = asyncio.create_task(body_of(flight))
        await asyncio.sleep(0.01)
        app.gate.release()
        second = asyncio.create_task(body_of(flight))
        await asyncio.sleep(0.01)
        assert flight.answer is None and not landed
        app.gate.release()
        assert await first == await second == b"xyz"
        assert await body_of(flight) == b"xyz"  # after the end
        assert landed == [flight] and flight.answer == (((b"a", b"b"),), b"xyz")
        assert "answer_is_complete" not in SCOPE["state"]

    asyncio.run(scenario())


def test_one_client_that_leaves_costs_the_others_nothing_and_the_last_ends_the_work() -> None:
    async def scenario(everyone: bool) -> None:
        app, landed = App(), list[Flight]()
        flight = Flight(app, SCOPE, b"body", landed.append)
        clients = [asyncio.create_task(body_of(flight)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for client in clients if everyone else clients[:1]:
            client.cancel()
        await asyncio.sleep(0.01)
        app.gate.release()
        app.gate.release()
        found = await asyncio.gather(*clients, return_exceptions=True)
        assert flight.is_abandoned == everyone and landed == [flight]
        assert app.ended == ("left" if everyone else "done")
        assert everyone or found[1] == b"xyz"
        assert (flight.answer is None) == everyone

    asyncio.run(scenario(False))
    asyncio.run(scenario(True))


def test_an_exception_reaches_every_client_after_what_was_sent() -> None:
    async def scenario() -> None:
        app = App(RuntimeError("injected"))
        flight = Flight(app, SCOPE, b"body", lambda flight: None)
        app.gate.release()
        app.gate.release()

        async def collect() -> list[Any]:
            found = []
            with pytest.raises(RuntimeError, match="injected"):
                async with aclosing(flight.follow()) as messages:
                    async for message in messages:
                        found.append(message.get("body"))
            return found

        assert await asyncio.gather(collect(), collect()) == [[None, b"x", b"y"]] * 2
        assert flight.answer is None

    asyncio.run(scenario())

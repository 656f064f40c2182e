"""What a connection writes in a turn of the event loop goes out in one piece, and nothing waits for longer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from optkit.serve.http.connection import Connection
from optkit.serve.http.joined_writes import MOST_HELD, JoinedWrites


class RecordingTransport(asyncio.Transport):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def joined() -> tuple[RecordingTransport, JoinedWrites]:
    transport = RecordingTransport()
    return transport, JoinedWrites(transport, asyncio.get_running_loop())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_writes_of_a_turn_are_one_write() -> None:
    async def go() -> None:
        transport, writes = joined()
        writes.write(b"head ")
        writes.write(b"event")
        assert transport.writes == []
        await turns(2)
        assert transport.writes == [b"head event"]
        writes.write(b"next")
        await turns(2)
        assert transport.writes == [b"head event", b"next"]

    asyncio.run(go())


def test_what_was_written_is_sent_before_a_close() -> None:
    async def go() -> None:
        transport, writes = joined()
        writes.write(b"last")
        writes.close()
        assert transport.writes == [b"last"] and transport.closed and writes.is_closing()
        await turns(2)
        assert transport.writes == [b"last"]

    asyncio.run(go())


def test_a_sender_that_never_waits_fills_no_memory() -> None:
    async def go() -> None:
        transport, writes = joined()
        piece = b"x" * 1000
        for count in range(1, 1000):
            writes.write(piece)
            assert count * len(piece) - sum(map(len, transport.writes)) <= MOST_HELD
        await turns(2)
        assert b"".join(transport.writes) == piece * 999

    asyncio.run(go())


async def streaming_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with a head and an event at once, and with another event later."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})
    await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"second", "more_body": False})


@pytest.mark.parametrize("end", ["", "connection: close\r\n"])
def test_a_response_head_goes_out_with_the_first_event(end: str) -> None:
    async def go() -> None:
        transport = RecordingTransport()
        config = uvicorn.Config(streaming_app, log_config=None, lifespan="off")
        config.load()
        connection = Connection(config, ServerState(), {})
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.data_received(f"GET / HTTP/1.1\r\nhost: localhost\r\n{end}\r\n".encode())
        while len(transport.writes) < 2:
            await asyncio.sleep(0.001)
        await turns(2)
        first, second = transport.writes
        assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\n5\r\nfirst\r\n")
        assert second == b"6\r\nsecond\r\n0\r\n\r\n"
        assert transport.closed == bool(end)
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(go(), 20))

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

    def write_eof(self) -> None:
        self.write(b"(end)")

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


def test_nothing_overtakes_what_was_written() -> None:
    async def go() -> None:
        transport, writes = joined()
        writes.write(b"first ")
        writes.writelines([b"second ", b"third"])
        writes.write_eof()
        assert transport.writes == [b"first second third", b"(end)"]

    asyncio.run(go())


def test_nothing_is_written_to_a_transport_that_was_closed() -> None:
    async def go() -> None:
        transport, writes = joined()
        writes.write(b"late")
        transport.close()
        await turns(2)
        assert transport.writes == []

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


@pytest.mark.parametrize("data", ["text", None, 5])
def test_what_is_no_bytes_is_an_error_of_its_writer_alone(data: Any) -> None:
    async def go() -> None:
        transport, writes = joined()
        writes.write(b"before ")
        with pytest.raises(TypeError):
            writes.write(data)
        writes.write(bytearray(b"after "))
        await turns(2)
        writes.write(memoryview(b"end"))
        await turns(2)
        assert transport.writes == [b"before after ", b"end"]

    asyncio.run(go())


def test_what_is_written_is_what_the_buffer_held_then() -> None:
    async def go() -> None:
        transport, writes = joined()
        buffer = bytearray(b"first")
        writes.write(buffer)
        buffer[:] = b"other"
        writes.write(buffer)
        await turns(2)
        assert transport.writes == [b"firstother"]

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


async def short_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"short"})


def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    """A client may end its side of the connection with its request, as ``nc -N`` does (RFC 9112, section 9.6)."""

    async def go() -> None:
        config = uvicorn.Config(short_app, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            writer.write_eof()
            assert (await reader.read()).endswith(b"\r\n\r\nshort")
            writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(go(), 20))

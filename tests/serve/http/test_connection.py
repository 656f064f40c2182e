"""Clients that send their headers slowly, or none: they are let go, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest
import uvicorn

from optkit.serve.http import connection
from optkit.serve.http.connection import Connection
from tests.support.serve_fakes import tiny_app

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Run = Callable[[Callable[[Connect], Awaitable[None]]], None]
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test against a server that waits 0.3 s for headers; it is handed what opens a connection."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)

    def run(test: Callable[[Connect], Awaitable[None]]) -> None:
        async def go() -> None:
            with socket.create_server(("127.0.0.1", 0)) as sock:
                port = sock.getsockname()[1]
                config = uvicorn.Config(tiny_app(), http=Connection, log_config=None, lifespan="off")
                server = uvicorn.Server(config)
                server.capture_signals = nullcontext  # type: ignore[method-assign]
                serving = asyncio.create_task(server.serve(sockets=[sock]))
                await test(lambda: asyncio.open_connection("127.0.0.1", port))
                server.should_exit = True
                await serving

        asyncio.run(go())

    return run


@pytest.mark.parametrize("sent", [b"", b"G", HEAD])
def test_headers_that_do_not_come_end_the_connection(sent: bytes, serve: Run) -> None:
    async def slow(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
        writer.close()

    serve(slow)


def test_a_byte_now_and_then_buys_no_time(serve: Run) -> None:
    async def trickle(connect: Connect) -> None:
        reader, writer = await connect()
        answer = asyncio.create_task(reader.read())
        for byte in HEAD * 20:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if answer.done():
                break
        assert answer.result().startswith(b"HTTP/1.1 408 ")

    serve(trickle)


def test_whole_headers_are_answered_and_the_connection_may_be_used_again(serve: Run) -> None:
    async def twice(connect: Connect) -> None:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(b'{"status":"ready"}'))
            await asyncio.sleep(0.5)  # idle between two requests: uvicorn's own limit
        writer.write(HEAD)
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
        writer.close()

    serve(twice)

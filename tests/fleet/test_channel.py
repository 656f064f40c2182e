"""Links over TCP: the same tokens, few frames, no stranger, and a clear end when a side is gone or silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from optkit.fleet import channel
from optkit.fleet.channel import LENGTH, ChannelServer, connect
from optkit.fleet.remote_replica import RemoteReplica
from optkit.fleet.replica import ReplicaGone, Work
from optkit.fleet.served_replica import ServedReplica
from tests.support.fleet import ask, local, on_loop, soon, tokens_of, within
from tests.support.serve_fakes import FakeEngine

SECRET = b"s" * 32


def work(name: str = "a") -> Work:
    return Work(request=ask(name))


class TcpStub:
    """The links of a stub, over TCP to ``port``."""

    def __init__(self, port: int, secret: bytes = SECRET) -> None:
        self.port, self._secret = port, secret

    async def link(self) -> channel.ChannelClient:
        return await connect("127.0.0.1", self.port, self._secret, "far")


class Relay:
    """A network between both sides: counts frames from the replica, and can fall silent without closing."""

    def __init__(self, port: int) -> None:
        self._port, self.is_silent, self.num_bytes = port, False, 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        for source, target in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._pass(source, target)))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            while self.is_silent:
                await asyncio.sleep(0.01)
            self.num_bytes += len(data)
            target.write(data)
        target.close()

    def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def tcp(engine: FakeEngine) -> AsyncIterator[tuple[RemoteReplica, ChannelServer, Relay]]:
    """A replica on ``engine`` behind a TCP link with a relay between."""
    served = ServedReplica(local(engine, "far"))
    server = ChannelServer(served, SECRET)
    _, port = await server.start("127.0.0.1")
    relay = Relay(port)
    remote = RemoteReplica(TcpStub(await relay.start()), "far")  # type: ignore[arg-type]
    await soon(lambda: remote._link is not None)
    try:
        yield remote, server, relay
    finally:
        await remote.close()
        await server.close()
        relay.stop()


@on_loop
async def test_a_channel_carries_the_same_tokens() -> None:
    engine = FakeEngine()
    expected = await tokens_of(engine.generate(ask()))
    async with tcp(engine) as (remote, _, _):
        runs = (tokens_of(remote.generate(work(str(index)))) for index in range(20))
        assert await within(asyncio.gather(*runs)) == [expected] * 20


@on_loop
async def test_outputs_of_all_requests_share_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = FakeEngine(), list[int]()
    engine.delay = 0.01
    send = channel.Frames.send

    def counted(self: channel.Frames, body: bytes) -> None:
        sizes.append(len(body))
        send(self, body)

    async with tcp(engine) as (remote, _, _):
        monkeypatch.setattr(channel.Frames, "send", counted)
        found = await within(
            asyncio.gather(*(tokens_of(remote.generate(work(str(index)))) for index in range(16)))
        )
    assert len(sizes) - 16 < sum(map(len, found)) / 4, "16 frames are requests"


@on_loop
async def test_leaving_early_aborts_at_the_replica() -> None:
    engine = FakeEngine()
    engine.delay = 0.005
    async with tcp(engine) as (remote, _, _):
        stream = remote.generate(work())
        await anext(stream)
        await stream.aclose()
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_the_end_of_the_replica_ends_streams_at_once() -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with tcp(engine) as (remote, server, _):
        waiting = asyncio.ensure_future(anext(remote.generate(work())))
        await soon(lambda: engine.requests)
        await server.close()
        with pytest.raises(ReplicaGone):
            await asyncio.wait_for(waiting, channel.BEAT_SECONDS)
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_a_side_that_falls_silent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power closes no connection."""
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.05)
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with tcp(engine) as (remote, _, relay):
        waiting = asyncio.ensure_future(anext(remote.generate(work())))
        await soon(lambda: engine.requests)
        relay.is_silent = True
        with pytest.raises(ReplicaGone, match="no word"):
            await within(waiting)
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_an_idle_link_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr("optkit.fleet.served_replica.IDLE_SECONDS", 0.05)
    engine = FakeEngine()
    async with tcp(engine) as (remote, _, _):
        link = remote._link
        await asyncio.sleep(2.0)
        assert remote._link is link and await within(tokens_of(remote.generate(work())))


@on_loop
async def test_strangers_are_refused_on_both_sides() -> None:
    server = ChannelServer(ServedReplica(local(FakeEngine(), "far")), SECRET)
    _, port = await server.start("127.0.0.1")
    with pytest.raises(ReplicaGone):
        await connect("127.0.0.1", port, b"x" * 32, "far")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(LENGTH.pack(channel.MAX_STRANGER_FRAME + 1) + b"x" * 100)
    await reader.readexactly(LENGTH.size)
    assert await within(reader.read()) is not None
    assert reader.at_eof()
    writer.close()
    assert not server._open
    await server.close()
    with pytest.raises(ReplicaGone):
        await connect("127.0.0.1", port, SECRET, "far")


@on_loop
async def test_a_replica_without_the_secret_gets_no_request() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: msgspec.Struct) -> None:
            body = msgspec.msgpack.encode(message)
            writer.write(LENGTH.pack(len(body)) + body)

        send(channel.Hello(b"n" * 32))
        await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
        send(channel.Welcome(b"p" * 32))

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    with pytest.raises(ReplicaGone, match="another secret"):
        await connect("127.0.0.1", server.sockets[0].getsockname()[1], SECRET, "far")
    server.close()

"""Links over TCP: the same tokens, few frames, no stranger, and a clear end when a side is gone or silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from optkit.fleet import channel, frames, wire
from optkit.fleet.channel import ChannelServer, connect
from optkit.fleet.frames import LENGTH
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
            await asyncio.wait_for(waiting, frames.BEAT_SECONDS)
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_a_side_that_falls_silent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power closes no connection."""
    monkeypatch.setattr(frames, "BEAT_SECONDS", 0.05)
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with tcp(engine) as (remote, _, relay):
        waiting = asyncio.ensure_future(anext(remote.generate(work())))
        await soon(lambda: engine.requests)
        relay.is_silent = True
        with pytest.raises(ReplicaGone, match="no frame"):
            await within(waiting)
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_an_idle_link_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "BEAT_SECONDS", 0.05)
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


@asynccontextmanager
async def listening(engine: FakeEngine) -> AsyncIterator[tuple[ChannelServer, int]]:
    server = ChannelServer(ServedReplica(local(engine, "far")), SECRET)
    _, port = await server.start("127.0.0.1")
    try:
        yield server, port
    finally:
        await server.close()
        assert not server._tasks and not server._open and not server._strangers


async def joined(port: int) -> frames.Frames:
    """A connection with the proof."""
    return (await connect("127.0.0.1", port, SECRET, "far"))._frames


@on_loop
async def test_a_stranger_that_sends_nothing_or_one_byte_after_the_other_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "JOIN_SECONDS", 0.2)
    async with listening(FakeEngine()) as (server, port):
        silent = await asyncio.open_connection("127.0.0.1", port)
        slow = await asyncio.open_connection("127.0.0.1", port)
        await soon(lambda: len(server._strangers) == 2)

        async def drip() -> None:
            slow[1].write(LENGTH.pack(1000))
            while True:
                slow[1].write(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        await soon(lambda: not server._strangers and not server._tasks)
        dripping.cancel()
        for reader, writer in (silent, slow):
            with suppress(ConnectionError):
                await within(reader.read())
            writer.close()


@on_loop
async def test_strangers_beyond_a_number_are_closed_and_a_replica_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_STRANGERS", 8)
    monkeypatch.setattr(channel, "JOIN_SECONDS", 2.0)
    async with listening(FakeEngine()) as (server, port):
        member = await joined(port)
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await soon(lambda: len(server._strangers) == 8)
        assert len(server._open) == 1
        for _, writer in crowd:
            writer.close()
        await soon(lambda: not server._strangers)
        (await joined(port)).close()
        member.close()


@on_loop
async def test_a_proof_can_not_be_repeated() -> None:
    async with listening(FakeEngine()) as (_, port):
        heard: list[bytes] = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            line = frames.Frames(reader, writer)
            hello = await channel.first_message(line, channel._hello)
            if not heard:
                nonces = hello.nonce, b"n" * channel.NONCE_BYTES
                join = channel.Join(nonces[1], channel.proof(SECRET, "client", nonces))
                heard.append(wire.encode(join))
                line.send(heard[0])
                await channel.first_message(line, channel._welcome)
            else:
                line.send(heard[0])
                with pytest.raises(frames.ChannelError):
                    await channel.first_message(line, channel._welcome)
            line.close()


@on_loop
async def test_a_nonce_of_another_length_is_refused() -> None:
    async with listening(FakeEngine()) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line = frames.Frames(reader, writer)
        await channel.first_message(line, channel._hello)
        line.send(wire.encode(channel.Join(b"", b"p" * 32)))
        with pytest.raises(frames.ChannelError):
            await channel.first_message(line, channel._welcome)
        line.close()


@on_loop
@pytest.mark.parametrize(
    "body", [b"\x00", b"\xc1", wire.encode(channel.Submit(b"\xff")), wire.encode(channel.Hello(b""))]
)
async def test_a_wrong_message_ends_the_connection_and_its_requests(body: bytes) -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with listening(engine) as (server, port):
        line = await joined(port)
        line.send(wire.encode(channel.Submit(wire.encode(wire.Sent.now(work())))))
        await soon(lambda: engine.requests)
        line.send(body)
        await soon(lambda: engine.aborted == ["a"] and not server._tasks)


@on_loop
async def test_a_failure_inside_a_connection_is_logged_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(FakeEngine()) as (server, port):

        async def fails(*_: object) -> None:
            raise RuntimeError("not foreseen")

        monkeypatch.setattr(server._served, "submit", fails)
        line = await joined(port)
        line.send(wire.encode(channel.Submit(wire.encode(wire.Sent.now(work())))))
        await soon(lambda: not server._tasks)
    assert "not foreseen" in caplog.text


@on_loop
async def test_a_server_that_reads_nothing_holds_up_no_end() -> None:
    """A connection with unsent bytes is closed with the replica."""
    async with listening(FakeEngine()) as (server, port):
        line = await joined(port)
        line._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await soon(lambda: server._open)
        (there,) = server._open
        while not there.num_unsent:
            there.send(b"x" * 2**20)
            await asyncio.sleep(0)
        await within(server.close())
        assert there._writer.transport.is_closing()
        await soon(lambda: there.num_unsent == 0)
        line.close()

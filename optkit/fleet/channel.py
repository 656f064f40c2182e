"""Tokens between a server and a replica: one TCP connection for all requests.

Ray places, counts and replaces replicas; reports and orders, a few a second, are calls of Ray. Tokens come hundreds of
times a second, and a call of Ray costs more processor time than the engine's step. So each replica listens at a port,
and ``ChannelClient`` has the four calls of a link (``optkit.fleet.wire.Link``) over a connection::

    server  Hello(nonce)
    client  Join(nonce, proof)
    server  Welcome(proof)
    client  Submit, Abort, ...              # as requests come and go
    server  events (``wire.Events``), ...   # all that came since the last frame

Messages are msgpack in frames (``optkit.fleet.frames``). An empty frame is a keep-alive, sent once a second when idle;
a connection without a frame for some seconds counts as lost. The proofs are HMACs of both nonces with the secret of the
deployment. The bytes are not encrypted, like those of KV between replicas.

Before the proof a connection may send one small frame within ``JOIN_SECONDS``, and at most ``MAX_STRANGERS``
connections are in that state. After the proof the other side is trusted, but a wrong message ends the connection.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import uuid
from contextlib import suppress
from typing import TypeVar

import msgspec

from optkit.fleet import frames as framing
from optkit.fleet import wire
from optkit.fleet.frames import KEEP_ALIVE, ChannelError, Frames, decoded
from optkit.fleet.replica import ReplicaGone
from optkit.fleet.served_replica import ServedReplica

log = logging.getLogger("optkit.fleet")

SILENT_BEATS = 4  # without a frame from a replica, after which the streams move to other replicas
SILENT_SERVER_BEATS = 15  # without a frame from a server, after which the server's requests are aborted
JOIN_SECONDS = 5.0  # for the exchange of proofs
NONCE_BYTES = 32
MAX_STRANGERS = 64  # connections before the proof; further ones are closed
MAX_STRANGER_FRAME = 4096  # before the proof

M = TypeVar("M")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: bytes


class Join(msgspec.Struct, frozen=True, tag="join"):
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Begin a request.

    Attributes:
        sent: an encoded ``wire.Sent``.
    """

    sent: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_join: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
_welcome: msgspec.msgpack.Decoder[Welcome] = msgspec.msgpack.Decoder(Welcome)
_from_client: msgspec.msgpack.Decoder[Submit | Abort] = msgspec.msgpack.Decoder(Submit | Abort)


def proof(secret: bytes, side: str, nonces: tuple[bytes, bytes]) -> bytes:
    """The proof of ``secret`` by ``side``, for the nonces of server and client.

    Raises:
        ChannelError: a nonce has another length than ``NONCE_BYTES``.
    """
    if any(len(nonce) != NONCE_BYTES for nonce in nonces):
        raise ChannelError(f"a nonce must have {NONCE_BYTES} bytes")
    key = hmac.digest(secret, b"optkit fleet channel", "sha256")
    return hmac.digest(key, b"\0".join((side.encode(), *nonces)), "sha256")


async def first_message(frames: Frames, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """A message before the proof; raises ChannelError."""
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            return decoded(decoder, await frames.receive(SILENT_SERVER_BEATS, MAX_STRANGER_FRAME))
    except TimeoutError as error:
        raise ChannelError("no proof came in time") from error


class ChannelServer:
    """The replica's end: links of ``served`` over connections.

    Args:
        secret: of the deployment.
    """

    def __init__(self, served: ServedReplica, secret: bytes) -> None:
        self._served, self._secret = served, secret
        self._server: asyncio.Server | None = None
        self._strangers: set[Frames] = set()
        self._open: set[Frames] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection

    async def start(self, host: str) -> tuple[str, int]:
        """Listen at any free port of ``host``; returns the address."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        address, port, *_ = self._server.sockets[0].getsockname()
        return str(address), int(port)

    async def flushed(self, seconds: float = JOIN_SECONDS) -> None:
        """Return when all is sent, or after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(frames.num_unsent for frames in self._open):
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop listening, and end all connections with their requests."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin a connection."""
        frames = Frames(reader, writer)
        if len(self._strangers) >= MAX_STRANGERS:
            frames.close()
            return
        task = asyncio.create_task(self._connection(frames))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, frames: Frames) -> None:
        """Serve a connection from the first byte to the last."""
        try:
            self._strangers.add(frames)
            try:
                await self._welcome(frames)
            finally:
                self._strangers.discard(frames)
            self._open.add(frames)
            await self._serve(frames)
        except ChannelError as error:
            log.warning("a connection to the replica was refused: %s", error)
        except Exception:
            log.exception("a connection to the replica failed")
        finally:
            self._open.discard(frames)
            frames.close()

    async def _serve(self, frames: Frames) -> None:
        """Carry requests and events of a link until either direction ends; then all requests of the link end."""
        link = uuid.uuid4().hex
        await self._served.open(link)
        ways = [asyncio.create_task(way(frames, link)) for way in (self._send_events, self._take_requests)]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        except (ChannelError, ReplicaGone, msgspec.MsgspecError) as error:
            log.info("the link of a server has ended: %s", error)
        finally:
            for way in ways:
                way.cancel()
            self._served.close(link)
            await asyncio.gather(*ways, return_exceptions=True)

    async def _welcome(self, frames: Frames) -> None:
        """Exchange proofs; raises ChannelError for a client without the secret."""
        nonce = os.urandom(NONCE_BYTES)
        frames.send(wire.encode(Hello(nonce)))
        join = await first_message(frames, _join)
        if not hmac.compare_digest(join.proof, proof(self._secret, "client", (nonce, join.nonce))):
            raise ChannelError("another secret")
        frames.send(wire.encode(Welcome(proof(self._secret, "server", (nonce, join.nonce)))))

    async def _send_events(self, frames: Frames, link: str) -> None:
        while True:
            frames.send(await self._served.take(link))
            await frames.sent()

    async def _take_requests(self, frames: Frames, link: str) -> None:
        """Begin and abort requests, as the client asks."""
        while True:
            body = await frames.receive(SILENT_SERVER_BEATS)
            if body == KEEP_ALIVE:
                continue
            message = decoded(_from_client, body)
            if isinstance(message, Submit):
                await self._served.submit(link, message.sent)
            else:
                await self._served.abort(link, message.request_id)


class ChannelClient:
    """The server's end (``optkit.fleet.wire.Link``); all methods raise ReplicaGone.

    Args:
        frames: of a connection that ``connect`` has made.
    """

    def __init__(self, frames: Frames, replica_id: str) -> None:
        self._frames, self._replica_id = frames, replica_id
        self._beating = asyncio.create_task(self._beat())

    def submit(self, sent: bytes) -> None:
        """Begin a request, whose outputs come by ``take``."""
        self._send(wire.encode(Submit(sent)))

    def abort(self, request_id: str) -> None:
        """End a request without a further output."""
        self._send(wire.encode(Abort(request_id)))

    async def take(self) -> bytes:
        """All events since the last call, encoded; NOTHING where none came for a while."""
        try:
            return await self._frames.receive(SILENT_BEATS)
        except ChannelError as error:
            raise self._gone(error) from error

    def close(self) -> None:
        """End the connection; the replica aborts the requests."""
        self._beating.cancel()
        self._frames.close()

    def _send(self, body: bytes) -> None:
        try:
            self._frames.send(body)
        except ChannelError as error:
            raise self._gone(error) from error

    async def _beat(self) -> None:
        """Send a keep-alive once a second."""
        with suppress(ChannelError):
            while True:
                await asyncio.sleep(framing.BEAT_SECONDS)
                self._frames.send(KEEP_ALIVE)

    def _gone(self, error: ChannelError) -> ReplicaGone:
        return ReplicaGone(str(error), was_begun=False, replica_id=self._replica_id)


async def connect(host: str, port: int, secret: bytes, replica_id: str) -> ChannelClient:
    """A link to the replica that listens at ``host`` and ``port``.

    Raises:
        ReplicaGone: nobody with the secret answers there.
    """

    def gone(error: object) -> ReplicaGone:
        return ReplicaGone(f"{host}:{port}: {error}", was_begun=False, replica_id=replica_id)

    try:
        async with asyncio.timeout(JOIN_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise gone(error) from error
    frames = Frames(reader, writer)
    try:
        hello = await first_message(frames, _hello)
        nonce = os.urandom(NONCE_BYTES)
        nonces = hello.nonce, nonce
        frames.send(wire.encode(Join(nonce, proof(secret, "client", nonces))))
        welcome = await first_message(frames, _welcome)
        if not hmac.compare_digest(welcome.proof, proof(secret, "server", nonces)):
            raise ChannelError("another secret")
    except BaseException as error:
        frames.close()
        if isinstance(error, ChannelError):
            raise gone(error) from error
        raise
    return ChannelClient(frames, replica_id)

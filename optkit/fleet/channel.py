"""The way of tokens between a server and a replica: one TCP connection for all requests.

Ray places, counts and replaces replicas, and its calls carry reports and orders, a few a second. Tokens come hundreds
of times a second, and a call of Ray costs more processor time than the step behind it. So each replica listens at a
port, and ``ChannelClient`` has the four calls of a link (``optkit.fleet.wire.Link``) over a connection::

    server  Hello(nonce)
    client  Join(nonce, proof)
    server  Welcome(proof)
    client  Submit, Abort, ...              # as requests come and go
    server  events (``wire.Events``), ...   # all that came since the last frame

A frame is a 4-byte big-endian length and as many bytes of msgpack. An empty frame says "alive", once a second where
nothing else is said; a side without a word for some seconds has gone. The proofs are HMACs of both nonces by the secret
of the deployment. The bytes are not encrypted, as those of KV between replicas.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import struct
import uuid
from contextlib import suppress
from typing import TypeVar

import msgspec

from optkit.fleet import wire
from optkit.fleet.replica import ReplicaGone
from optkit.fleet.served_replica import ServedReplica

log = logging.getLogger("optkit.fleet")

ALIVE = b""  # the body of a frame without a message
BEAT_SECONDS = 1.0
SILENT_BEATS = 4  # without a word from a replica, after which its streams move to others
SILENT_SERVER_BEATS = 15  # without a word from a server, after which its requests are aborted
JOIN_SECONDS = 5.0
NONCE_BYTES = 32
MAX_FRAME = 256 * 2**20  # prompts of some million tokens, and logprobs of them
MAX_STRANGER_FRAME = 4096  # before the proof
LENGTH = struct.Struct(">I")

M = TypeVar("M")


class ChannelError(Exception):
    """The other side is gone, silent, or says something else than the protocol allows."""


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
    """The proof of ``secret`` by ``side``, for the nonces of server and client."""
    key = hmac.digest(secret, b"optkit fleet channel", "sha256")
    return hmac.digest(key, b"\0".join((side.encode(), *nonces)), "sha256")


class Frames:
    """A connection as frames. Methods raise ChannelError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._is_closed = False

    def send(self, body: bytes) -> None:
        """Send a frame; the kernel gets the bytes at once or as the other side reads."""
        if self._is_closed or self._writer.is_closing():
            raise ChannelError("the connection is closed")
        self._writer.write(LENGTH.pack(len(body)) + body)

    async def sent(self) -> None:
        """Return when little is waiting to be sent."""
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelError(f"the connection broke: {error}") from error

    @property
    def num_unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self, silent_beats: int, most: int = MAX_FRAME) -> bytes:
        """The body of the next frame. Several short waits bear a pause of this process; a long one would not."""
        for _ in range(silent_beats):
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                break
            except TimeoutError:
                continue
            except (EOFError, OSError) as error:
                raise ChannelError("the connection broke") from error
        else:
            raise ChannelError(f"no word for {silent_beats * BEAT_SECONDS:g} s")
        if length > most:
            raise ChannelError(f"a frame of {length} bytes")
        try:
            async with asyncio.timeout(silent_beats * BEAT_SECONDS):
                return await self._reader.readexactly(length)
        except TimeoutError as error:
            raise ChannelError("half a frame came") from error
        except (EOFError, OSError) as error:
            raise ChannelError("the connection broke") from error

    async def message(self, decoder: msgspec.msgpack.Decoder[M]) -> M:
        """A message before the proof."""
        return decoded(decoder, await self.receive(round(JOIN_SECONDS / BEAT_SECONDS), MAX_STRANGER_FRAME))

    def close(self) -> None:
        self._is_closed = True
        self._writer.close()


def decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ChannelError(f"no message of the protocol: {error}") from error


class ChannelServer:
    """The replica's end: links of ``served`` over connections.

    Args:
        secret: of the deployment.
    """

    def __init__(self, served: ServedReplica, secret: bytes) -> None:
        self._served, self._secret = served, secret
        self._server: asyncio.Server | None = None
        self._open: set[Frames] = set()

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
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for frames in list(self._open):
            frames.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames(reader, writer)
        try:
            await self._welcome(frames)
        except ChannelError as error:
            log.warning("a connection to the replica was refused: %s", error)
            frames.close()
            return
        self._open.add(frames)
        link = uuid.uuid4().hex
        await self._served.open(link)
        hearing = asyncio.create_task(self._hear(frames, link))
        try:
            while True:
                frames.send(await self._served.take(link))
                await frames.sent()
        except (ChannelError, ReplicaGone) as error:
            log.info("the link of a server has ended: %s", error)
        finally:
            hearing.cancel()
            self._open.discard(frames)
            self._served.close(link)
            frames.close()

    async def _welcome(self, frames: Frames) -> None:
        """Take a client with the secret."""
        nonce = os.urandom(NONCE_BYTES)
        frames.send(wire.encode(Hello(nonce)))
        join = await frames.message(_join)
        if not hmac.compare_digest(join.proof, proof(self._secret, "client", (nonce, join.nonce))):
            raise ChannelError("another secret")
        frames.send(wire.encode(Welcome(proof(self._secret, "server", (nonce, join.nonce)))))

    async def _hear(self, frames: Frames, link: str) -> None:
        """Begin and abort requests, as the client says."""
        try:
            while True:
                body = await frames.receive(SILENT_SERVER_BEATS)
                if body == ALIVE:
                    continue
                message = decoded(_from_client, body)
                if isinstance(message, Submit):
                    await self._served.submit(link, message.sent)
                else:
                    await self._served.abort(link, message.request_id)
        except (ChannelError, ReplicaGone, msgspec.MsgspecError) as error:
            log.info("a server has gone: %s", error)
            self._served.close(link)


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
        """Say "alive" once a second."""
        with suppress(ChannelError):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._frames.send(ALIVE)

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
        hello = await frames.message(_hello)
        nonce = os.urandom(NONCE_BYTES)
        nonces = hello.nonce, nonce
        frames.send(wire.encode(Join(nonce, proof(secret, "client", nonces))))
        welcome = await frames.message(_welcome)
        if not hmac.compare_digest(welcome.proof, proof(secret, "server", nonces)):
            raise ChannelError("another secret")
    except BaseException as error:
        frames.close()
        if isinstance(error, ChannelError):
            raise gone(error) from error
        raise
    return ChannelClient(frames, replica_id)

"""The bytes between two engines on the way of KV blocks: frames, proofs of the secret, checksums.

A frame is a 4-byte big-endian length and as many bytes of msgpack. A ``Block`` is followed by the bytes of the KV and
by the checksum of frame and KV. Decoding checks types and can build nothing else; lengths are bounded before memory is
taken, and far closer before the proof of the other side::

    server  Hello(nonce)
    client  Join(nonce, identity, proof)
    server  Welcome(proof) or Refused(reason)
    client  Pull(...) or PullRecent(...)      # again and again
    server  Block KV checksum, ..., End(reason)

A proof is an HMAC of both nonces and the identity, so a recorded connection proves nothing. The bytes are not
encrypted: the network between replicas is as trusted as their memory (docs/fleet.md).
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from typing import TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_64

from optkit.runtime.kv.exchange import BlockKV

PROTOCOL = 3
NONCE_BYTES = 32
MAX_FRAME = 16 * 2**20  # a prompt of a million tokens is 5 MB
MAX_STRANGER_FRAME = 4096  # before the proof
LENGTH, CHECKSUM = struct.Struct(">I"), struct.Struct(">Q")
MAX_GROUPS = 4096
MAX_WANTED = 1 << 16

M = TypeVar("M")


class TransferError(Exception):
    """The other side sent something else than the protocol allows, or refused."""


class CorruptTransfer(TransferError):
    """The bytes of a block differ from the sent bytes."""


class Identity(msgspec.Struct, frozen=True):
    """Engines exchange blocks where all fields are equal.

    Attributes:
        version: digest of the artifact.
        layout: digest of the meaning of a block's bytes.
        block_size: tokens of a block.
    """

    version: str
    layout: str
    block_size: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    nonce: bytes
    protocol: int = PROTOCOL


class Join(msgspec.Struct, frozen=True, tag="join"):
    nonce: bytes
    identity: Identity
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The client gets no blocks, for ``reason``."""

    reason: str


class WantedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block by digest, and the groups of layers whose KV is wanted."""

    digest: bytes
    groups: tuple[int, ...]


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Send the wanted blocks in order, up to the first missing block.

    Attributes:
        prompt: tokens up to the end of the last block, to be computed first; empty: only what is cached is sent.
        salt, priority: of the request.
    """

    wanted: tuple[WantedBlock, ...]
    prompt: tuple[int, ...] = ()
    salt: str = ""
    priority: int = 0


class PullRecent(msgspec.Struct, frozen=True, tag="pull_recent"):
    """Send the most recently used blocks, parents first, up to ``num_bytes`` of KV."""

    num_bytes: int


class Block(msgspec.Struct, frozen=True, tag="block"):
    """A block, whose KV of ``num_bytes`` and checksum follow the frame.

    Attributes:
        number: place among the wanted blocks.
        before: digest of the block before; empty for a first block, which has a salt.
    """

    number: int
    before: bytes
    salt: str
    tokens: tuple[int, ...]
    groups: tuple[int, ...]
    num_bytes: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """No further block comes; with ``reason`` there are fewer than wanted."""

    reason: str = ""


FromServer = Hello | Welcome | Refused | Block | End
FromClient = Join | Pull | PullRecent
from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_encoder = msgspec.msgpack.Encoder()


def proof(secret: bytes, side: str, nonces: tuple[bytes, bytes], identity: Identity) -> bytes:
    """The proof of ``secret`` by ``side``, for the nonces of server and client."""
    key = hmac.digest(secret, b"optkit kv transfer", "sha256")
    return hmac.digest(key, b"\0".join((side.encode(), *nonces, _encoder.encode(identity))), "sha256")


def checksum(frame: bytes, data: memoryview) -> int:
    """The 64-bit XXH3 of ``frame`` and ``data``, which damage leaves unchanged with a chance of about 2^-64."""
    hashed = xxh3_64(frame)
    hashed.update(data)
    return hashed.intdigest()


class Channel:
    """A connection. All waits together last up to ``deadline``.

    Attributes:
        deadline: by ``time.monotonic()``.

    All methods raise TimeoutError, OSError (ConnectionError where the other side has gone) or TransferError.
    """

    def __init__(self, sock: socket.socket, seconds: float, max_frame: int = MAX_STRANGER_FRAME) -> None:
        self.sock, self.max_frame = sock, max_frame
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """Let waits last up to ``seconds`` from now."""
        self.deadline = time.monotonic() + seconds

    def send(self, message: FromServer | FromClient, *more: bytes | memoryview) -> None:
        """Send a message, and bytes after the frame."""
        body = _encoder.encode(message)
        self._send_all([LENGTH.pack(len(body)) + body, *more])

    def send_block(self, number: int, block: BlockKV) -> None:
        """Send a block."""
        data = block.data.data.cast("B")
        before, salt = (b"", block.before) if isinstance(block.before, str) else (block.before, "")
        header = _encoder.encode(Block(number, before, salt, block.tokens, block.groups, data.nbytes))
        frame = LENGTH.pack(len(header)) + header
        self._send_all([frame, data, CHECKSUM.pack(checksum(frame, data))])

    def receive(self, decoder: msgspec.msgpack.Decoder[M]) -> M:
        """The next message."""
        return self._receive(decoder)[0]

    def receive_block(self, buffer: memoryview) -> tuple[int, BlockKV] | End:
        """The number of the next block and the block, whose bytes are in ``buffer``; or the end.

        Raises:
            CorruptTransfer: the checksum differs.
        """
        message, frame = self._receive(from_server)
        if isinstance(message, End):
            return message
        if not isinstance(message, Block) or not 0 <= message.num_bytes <= buffer.nbytes:
            raise TransferError("a block of another size was expected")
        data = buffer[: message.num_bytes]
        self._fill(data)
        expected = bytearray(CHECKSUM.size)
        self._fill(memoryview(expected))
        if CHECKSUM.unpack(expected)[0] != checksum(frame, data):
            raise CorruptTransfer("the bytes of a block have changed on their way")
        kv = np.frombuffer(data, np.uint8)
        return message.number, BlockKV(message.before or message.salt, message.tokens, message.groups, kv)

    def is_closed(self) -> bool:
        """True where the other side has gone; waits for nothing."""
        self.sock.settimeout(0.0)
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _receive(self, decoder: msgspec.msgpack.Decoder[M]) -> tuple[M, bytes]:
        header = bytearray(LENGTH.size)
        self._fill(memoryview(header))
        (length,) = LENGTH.unpack(header)
        if length > self.max_frame:
            raise TransferError(f"a frame of {length} bytes is larger than {self.max_frame}")
        frame = bytearray(LENGTH.size + length)
        frame[: LENGTH.size] = header
        self._fill(memoryview(frame)[LENGTH.size :])
        try:
            return decoder.decode(memoryview(frame)[LENGTH.size :]), bytes(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"not a message: {error!s:.200}") from None

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            self._set_timeout()
            count = self.sock.recv_into(view[done:])
            if not count:
                raise ConnectionError("the connection has ended")
            done += count

    def _send_all(self, parts: list[bytes | memoryview]) -> None:
        """Send ``parts`` without a copy of all."""
        views = [memoryview(part) for part in parts if len(part)]
        while views:
            self._set_timeout()
            sent = self.sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _set_timeout(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side takes too long")
        self.sock.settimeout(left)


def welcome(channel: Channel, secret: bytes, identity: Identity) -> None:
    """Let a client in, on the server's side.

    Raises:
        TransferError: the client does not know the secret, or is another kind of engine.
    """
    nonce = os.urandom(NONCE_BYTES)
    channel.send(Hello(nonce))
    join = channel.receive(from_client)
    if not isinstance(join, Join) or len(join.nonce) != NONCE_BYTES:
        raise TransferError("a client that does not introduce itself")
    nonces = nonce, join.nonce
    if not hmac.compare_digest(join.proof, proof(secret, "client", nonces, join.identity)):
        raise TransferError("a client without the secret of the deployment")
    if join.identity != identity:
        reason = difference(join.identity, identity)
        channel.send(Refused(reason))
        raise TransferError(reason)
    channel.send(Welcome(proof(secret, "server", nonces, identity)))
    channel.max_frame = MAX_FRAME


def join(channel: Channel, secret: bytes, identity: Identity) -> None:
    """Introduce the client to the server.

    Raises:
        TransferError: the server does not know the secret, or refuses.
    """
    hello = channel.receive(from_server)
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES or hello.protocol != PROTOCOL:
        raise TransferError("a server of another kind or version")
    nonces = hello.nonce, os.urandom(NONCE_BYTES)
    channel.send(Join(nonces[1], identity, proof(secret, "client", nonces, identity)))
    answer = channel.receive(from_server)
    if isinstance(answer, Refused):
        raise TransferError(answer.reason)
    expected = proof(secret, "server", nonces, identity)
    if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, expected):
        raise TransferError("a server without the secret of the deployment")
    channel.max_frame = MAX_FRAME


def difference(theirs: Identity, ours: Identity) -> str:
    """The reason why two engines exchange no blocks."""
    if theirs.version != ours.version:
        return "another artifact"
    if theirs.block_size != ours.block_size:
        return f"blocks of {theirs.block_size} tokens, not of {ours.block_size}"
    return "another layout of the KV, or KV of other versions of the runtime"

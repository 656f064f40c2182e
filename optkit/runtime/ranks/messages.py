"""Messages from rank 0 to the other ranks, over a socket pair, and the answers: frames of msgpack.

Both ends are processes of an engine; a frame from the other end is trusted as far as the types.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

import msgspec
import numpy as np

LENGTH = struct.Struct("<Q")


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the rank's share of an artifact.

    Attributes:
        meeting: the file in which ranks without shared memory meet.
        kind: of the sharing (``optkit.runtime.ranks.size.Sharing``).
    """

    artifact_dir: str
    rank: int
    size: int
    num_threads: int
    trust_code: bool
    meeting: str
    kind: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The share is loaded; ``weight_bytes`` of packed weights."""

    weight_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed: the fields of a ``UserError``."""

    what: str
    where: str | None = None
    fix: str | None = None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate KV pools of ``num_blocks`` blocks of ``block_tokens`` tokens, for groups of layers with ``windows``."""

    num_blocks: int
    block_tokens: int
    windows: tuple[int, ...]


class Array(msgspec.Struct, frozen=True):
    """An array by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run the graph on these batch inputs."""

    inputs: tuple[Array, ...]

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> Step:
        return Step(tuple(Array(name, a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()))

    def arrays(self) -> dict[str, np.ndarray]:
        """The inputs by name, writable."""
        return {
            a.name: np.frombuffer(bytearray(a.data), dtype=np.dtype(a.dtype)).reshape(a.shape)
            for a in self.inputs
        }


ToRank = Load | Allocate | Step
FromRank = Loaded | Failed
TO_RANK, FROM_RANK = msgspec.msgpack.Decoder(ToRank), msgspec.msgpack.Decoder(FromRank)


class RankGone(Exception):
    """The other end closed the socket."""


def frame(message: ToRank | FromRank) -> bytes:
    """``message`` with its length in front."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def send(sock: socket.socket, data: bytes) -> None:
    """Write a frame.

    Raises:
        RankGone: the other end is gone.
    """
    try:
        sock.sendall(data)
    except OSError as error:
        raise RankGone from error


def receive(sock: socket.socket) -> bytes:
    """The body of the next frame.

    Raises:
        RankGone: the other end is gone.
    """
    (length,) = LENGTH.unpack(exactly(sock, LENGTH.size))
    return exactly(sock, length)


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            got = sock.recv_into(view[done:])
        except OSError as error:
            raise RankGone from error
        if not got:
            raise RankGone
        done += got
    return bytes(data)

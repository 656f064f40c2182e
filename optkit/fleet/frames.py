"""A TCP connection as frames: a 4-byte big-endian length, and as many bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

KEEP_ALIVE = b""  # the body of a frame without a message
BEAT_SECONDS = 1.0  # between two keep-alives
MAX_FRAME = 256 * 2**20  # bytes: prompts of some million tokens, and logprobs of them
LENGTH = struct.Struct(">I")

M = TypeVar("M")


class ChannelError(Exception):
    """The connection is lost, or a message breaks the protocol."""


class Frames:
    """A connection as frames. Methods raise ChannelError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._is_closed = False

    def send(self, body: bytes) -> None:
        """Send a frame without waiting; unsent bytes are kept in memory."""
        if self._is_closed or self._writer.is_closing():
            raise ChannelError("the connection is closed")
        self._writer.write(LENGTH.pack(len(body)) + body)

    async def sent(self) -> None:
        """Return when few bytes wait to be sent."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise ChannelError(f"the connection broke: {error}") from error

    @property
    def num_unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self, silent_beats: int, most: int = MAX_FRAME) -> bytes:
        """The body of the next frame.

        Args:
            silent_beats: waits of ``BEAT_SECONDS`` for a frame to begin, and as long again for the rest. A pause of
                this process ends one wait, not all, so a frame that came meanwhile is found.
            most: bytes of the body.
        """
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
            raise ChannelError(f"no frame for {silent_beats * BEAT_SECONDS:g} s")
        if length > most:
            raise ChannelError(f"a frame of {length} bytes")
        try:
            async with asyncio.timeout(silent_beats * BEAT_SECONDS):
                return await self._reader.readexactly(length)
        except TimeoutError as error:
            raise ChannelError("half a frame came") from error
        except (EOFError, OSError) as error:
            raise ChannelError("the connection broke") from error

    def close(self) -> None:
        """End the connection at once: unsent bytes would hold it as long as the other side does not read."""
        self._is_closed = True
        self._writer.transport.abort()


def decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """The message in ``body``; raises ChannelError."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ChannelError(f"no message of the protocol: {error}") from error

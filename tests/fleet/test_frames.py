"""Frames over TCP: whole bodies, however the bytes are cut, and an error for a wrong or lost connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from optkit.fleet import frames
from optkit.fleet.frames import LENGTH, ChannelError, Frames, decoded
from tests.support.fleet import on_loop, within


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Frames, asyncio.StreamWriter]]:
    """The receiving side, and the sender's writer."""
    accepted: asyncio.Queue[Frames] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda reader, writer: accepted.put_nowait(Frames(reader, writer)), "127.0.0.1", 0
    )
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    there = await within(accepted.get())
    try:
        yield there, writer
    finally:
        there.close()
        writer.close()
        server.close()


@on_loop
async def test_bodies_arrive_whole_however_the_bytes_are_cut() -> None:
    bodies = [b"", b"a", b"b" * 1000, b"c" * 2**21]
    async with connected() as (there, writer):
        data = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
        for start, end in zip((0, 1, 3, 6, 700), (1, 3, 6, 700, len(data)), strict=True):
            writer.write(data[start:end])
            await asyncio.sleep(0.005)
        assert [await within(there.receive(4)) for _ in bodies] == bodies


@on_loop
async def test_a_frame_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    async with connected() as (there, writer):
        writer.write(LENGTH.pack(2**32 - 1))
        with pytest.raises(ChannelError, match="a frame of 4294967295 bytes"):
            await within(there.receive(4))


@on_loop
async def test_half_a_frame_and_silence_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "BEAT_SECONDS", 0.05)
    async with connected() as (there, writer):
        with pytest.raises(ChannelError, match="no frame"):
            await within(there.receive(2))
        writer.write(LENGTH.pack(10) + b"half")
        with pytest.raises(ChannelError, match="half a frame"):
            await within(there.receive(2))


@on_loop
async def test_a_pause_of_the_process_loses_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "BEAT_SECONDS", 0.1)
    async with connected() as (there, writer):
        receiving = asyncio.ensure_future(there.receive(3))
        await asyncio.sleep(0.01)
        writer.write(LENGTH.pack(1) + b"x")
        time.sleep(0.5)
        assert await within(receiving) == b"x"


@on_loop
async def test_a_closed_connection_is_an_error_on_both_sides() -> None:
    async with connected() as (there, writer):
        writer.close()
        with pytest.raises(ChannelError, match="broke"):
            await within(there.receive(4))
        there.close()
        with pytest.raises(ChannelError, match="closed"):
            there.send(b"x")


def test_a_body_that_is_no_message_is_an_error() -> None:
    with pytest.raises(ChannelError, match="protocol"):
        decoded(msgspec.msgpack.Decoder(int), b"\xa1x")

"""The bytes between engines: who is let in, and what becomes of wrong bytes."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet import kv_wire as wire
from optkit.fleet.kv_wire import (
    Channel,
    End,
    Hello,
    Identity,
    Pull,
    TransferError,
    WantedBlock,
    checksum,
    from_client,
    from_server,
    join,
    welcome,
)
from optkit.runtime.kv.exchange import BlockKV

SECRET, OTHER = b"s" * 32, b"t" * 32
IDENTITY = Identity("artifact", "layout", 32)


@contextmanager
def channels(seconds: float = 20.0, max_frame: int = wire.MAX_FRAME) -> Iterator[tuple[Channel, Channel]]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as first:
        second, _ = listener.accept()
        with second:
            yield Channel(first, seconds, max_frame), Channel(second, seconds, max_frame)


def meeting(client_secret: bytes, client: Identity) -> tuple[Exception | None, Exception | None]:
    """The errors of server and client."""
    with channels(max_frame=wire.MAX_STRANGER_FRAME) as (ours, theirs), ThreadPoolExecutor() as pool:

        def serve() -> None:
            try:
                welcome(theirs, SECRET, IDENTITY)
            except TransferError:
                theirs.sock.shutdown(socket.SHUT_RDWR)
                raise

        server = pool.submit(serve)
        joining = pool.submit(join, ours, client_secret, client)
        return server.exception(), joining.exception()  # type: ignore[return-value]


def test_engines_with_the_secret_and_the_same_artifact_and_layout_meet() -> None:
    assert meeting(SECRET, IDENTITY) == (None, None)


def test_a_client_without_the_secret_is_told_nothing() -> None:
    server, client = meeting(OTHER, IDENTITY)
    assert "secret" in str(server) and isinstance(client, ConnectionError)


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (Identity("other", "layout", 32), "another artifact"),
        (Identity("artifact", "other", 32), "another layout"),
        (Identity("artifact", "layout", 16), "blocks of 16 tokens, not of 32"),
    ],
)
def test_another_kind_of_engine_is_refused_with_the_reason(client: Identity, reason: str) -> None:
    for error in meeting(SECRET, client):
        assert isinstance(error, TransferError) and reason in str(error)


def test_a_server_without_the_secret_gives_nothing() -> None:
    with channels() as (ours, theirs), ThreadPoolExecutor() as pool:
        joining = pool.submit(join, ours, SECRET, IDENTITY)
        theirs.send(Hello(b"n" * wire.NONCE_BYTES))
        theirs.receive(from_client)
        theirs.send(wire.Welcome(b"p" * 32))
        assert "secret" in str(joining.exception())


def test_a_recorded_proof_opens_no_second_connection() -> None:
    with channels() as (ours, theirs), ThreadPoolExecutor() as pool:
        server = pool.submit(welcome, theirs, SECRET, IDENTITY)
        hello = ours.receive(from_server)
        assert isinstance(hello, Hello)
        nonces = b"other nonce".ljust(32), b"c" * 32
        ours.send(wire.Join(nonces[1], IDENTITY, wire.proof(SECRET, "client", nonces, IDENTITY)))
        assert "secret" in str(server.exception())


def block(size: int = 500) -> BlockKV:
    return BlockKV("salt", tuple(range(32)), (0, 2), np.arange(size, dtype=np.uint8))


def test_a_block_arrives_as_sent() -> None:
    with channels() as (ours, theirs):
        theirs.send_block(7, block())
        theirs.send(End("no more"))
        received = ours.receive_block(memoryview(bytearray(600)))
        assert not isinstance(received, End)
        number, there = received
        assert (number, there.before, there.tokens, there.groups) == (7, "salt", tuple(range(32)), (0, 2))
        assert there.data.tobytes() == block().data.tobytes()
        assert ours.receive_block(memoryview(bytearray(600))) == End("no more")


def test_the_checksum_is_xxh3() -> None:
    """The published value of no bytes, and the frame before the data."""
    assert checksum(b"", memoryview(b"")) == 0x2D06800538D394C2
    assert (
        checksum(b"fra", memoryview(b"me"))
        == checksum(b"frame", memoryview(b""))
        != checksum(b"", memoryview(b""))
    )


def test_a_block_larger_than_a_block_takes_no_memory() -> None:
    with channels() as (ours, theirs):
        theirs.send_block(0, block(601))
        with pytest.raises(TransferError, match="another size"):
            ours.receive_block(memoryview(bytearray(600)))


def test_a_frame_beyond_the_limit_is_not_read() -> None:
    with channels(max_frame=100) as (ours, theirs):
        theirs.max_frame = 1 << 20
        theirs.send(End("x" * 200))
        with pytest.raises(TransferError, match="larger than 100"):
            ours.receive(from_server)


def test_silence_ends_a_wait() -> None:
    with channels(seconds=0.05) as (ours, _), pytest.raises(TimeoutError):
        ours.receive(from_server)


def test_a_side_that_leaves_is_noticed() -> None:
    with channels() as (ours, theirs):
        assert not ours.is_closed()
        theirs.sock.close()
        while not ours.is_closed():
            threading.Event().wait(0.001)
        with pytest.raises(ConnectionError):
            ours.receive(from_server)


def stream() -> bytes:
    """The bytes of three blocks and the end."""
    with channels() as (ours, theirs):
        for number in range(3):
            theirs.send_block(
                number, BlockKV(b"before", tuple(range(32)), (0,), np.full(400, number, np.uint8))
            )
        theirs.send(End())
        theirs.sock.shutdown(socket.SHUT_WR)
        data = bytearray()
        while part := ours.sock.recv(1 << 16):
            data += part
        return bytes(data)


def read(data: bytes) -> list[tuple[int, BlockKV, bytes]]:
    """The blocks in ``data``, up to the first fault."""
    blocks: list[tuple[int, BlockKV, bytes]] = []
    with channels(seconds=2.0) as (ours, theirs):
        theirs.sock.sendall(data)
        theirs.sock.shutdown(socket.SHUT_WR)
        try:
            while True:
                received = ours.receive_block(memoryview(bytearray(400)))
                if isinstance(received, End):
                    return blocks
                blocks.append((*received, received[1].data.tobytes()))
        except (TransferError, OSError):
            return blocks


def test_no_block_with_a_flipped_bit_is_used() -> None:
    """A thousand flips at random places of the stream: each block is whole, or is not there."""
    data, dice = stream(), random.Random(7)
    whole = read(data)
    assert [(number, kv) for number, _, kv in whole] == [(n, bytes([n]) * 400) for n in range(3)]
    for _ in range(1000):
        place = dice.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        for number, there, kv in read(bytes(flipped)):
            assert kv == bytes([number]) * 400
            assert (there.before, there.tokens, there.groups) == (b"before", tuple(range(32)), (0,))


@given(st.integers(0, 1500))
def test_a_stream_cut_anywhere_gives_whole_blocks(length: int) -> None:
    data = STREAM[:length]
    assert [kv for _, _, kv in read(data)] == [bytes([n]) * 400 for n in range(3)][: len(read(data))]


@given(st.binary(max_size=200))
def test_noise_is_a_clean_end(noise: bytes) -> None:
    for decoder in (from_client, from_server):
        with channels(seconds=2.0) as (ours, theirs):
            theirs.sock.sendall(wire.LENGTH.pack(len(noise)) + noise)
            theirs.sock.shutdown(socket.SHUT_WR)
            try:
                ours.receive(decoder)
            except (TransferError, OSError):
                continue


def test_a_request_survives_the_way() -> None:
    pull = Pull((WantedBlock(b"d" * 32, (0, 1)),), (1, 2, 3), "salt", -2)
    with channels() as (ours, theirs):
        ours.send(pull)
        assert theirs.receive(from_client) == pull


STREAM = stream()

"""KV between two engines over a socket: hits where it comes, computing where it does not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from optkit.fleet import transfer
from optkit.fleet.kv_wire import Channel, Identity, Pull, TransferError, WantedBlock, join
from optkit.fleet.transfer import TransferClient, TransferServer, parse_address
from optkit.runtime.engine import Engine
from optkit.runtime.kv.exchange import Adoption, BlockExchange, Incoming
from tests.support.driven import SECRET, ask, driven
from tests.support.fakes import fake_engine

PROMPT = list(range(1, 46))
IDENTITY = Identity("v", "l", 4)
LONG = {"max_model_len": 64, "max_num_batched_tokens": 8}


def expected(prompt: list[int] = PROMPT, max_tokens: int = 6) -> list[int]:
    return fake_engine().generate([prompt], ask("r", prompt, max_tokens=max_tokens).sampling)[0]


def engine(**options: object) -> Engine:
    """An engine with digests of the common secret."""
    made = fake_engine(options=dict(options))
    made.share_digests(SECRET)
    return made


def pull(source: TransferServer, target: Engine, prompt: list[int] = PROMPT, seconds: float = 20.0) -> object:
    exchange = BlockExchange(target)
    incoming = Incoming(exchange, "", prompt)
    client = TransferClient(exchange, source.address, SECRET, IDENTITY, 5.0)
    try:
        return client.pull(incoming, seconds)
    finally:
        client.close()
        incoming.close()


def test_cached_blocks_come_over_and_what_is_missing_does_not() -> None:
    source, target = engine(), engine()
    source.generate([PROMPT[:30]], ask("r", PROMPT).sampling)
    server = TransferServer(BlockExchange(source), SECRET, IDENTITY)
    try:
        result = pull(server, target)
        assert result == transfer.Pulled(7, 7 * 32, result.seconds, 0, transfer.MISSING)  # type: ignore[attr-defined]
        assert server.num_sent == 7
    finally:
        server.close()
    assert target.generate([PROMPT], ask("r", PROMPT).sampling) == [expected()]
    assert target.stats().prefix_cache_hits == 28
    end = time.monotonic() + 30  # the server's thread gives the lease back when the connection has ended
    while len(source.scheduler.kv.leases) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(source.scheduler.kv.leases) == len(target.scheduler.kv.leases) == 0


def test_a_wrong_group_or_an_unexpected_message_ends_the_connection_alone() -> None:
    source = engine()
    source.generate([PROMPT], ask("r", PROMPT).sampling)
    server = TransferServer(BlockExchange(source), SECRET, IDENTITY)
    try:
        for message in (Pull((WantedBlock(b"d" * 32, (5,)),)), Pull((WantedBlock(b"", (-1,)),))):
            with socket.create_connection(parse_address(server.address)) as sock:
                channel = Channel(sock, 5.0)
                join(channel, SECRET, IDENTITY)
                channel.send(message)
                with pytest.raises(ConnectionError):
                    channel.receive(transfer.from_client)
        with socket.create_connection(parse_address(server.address)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            with contextlib.suppress(ConnectionResetError):  # unread bytes
                while sock.recv(1000):
                    pass
        assert pull(server, engine()).num_blocks == 11  # type: ignore[attr-defined]
    finally:
        server.close()


def test_no_connection_beyond_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_CONNECTIONS", 2)
    server = TransferServer(BlockExchange(engine()), SECRET, IDENTITY)
    try:
        waiting = [socket.create_connection(parse_address(server.address)) for _ in range(2)]
        for sock in waiting:
            assert sock.recv(1)  # served
        with socket.create_connection(parse_address(server.address)) as sock:
            assert sock.recv(1) == b""
        for sock in waiting:
            sock.close()
    finally:
        server.close()


def test_an_address_that_is_none_is_refused() -> None:
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80) and parse_address("[::1]:8000") == ("::1", 8000)
    for text in ("", "host", "host:", ":80", "host:1e3", "host:99999"):
        with pytest.raises(TransferError, match="host:port"):
            parse_address(text)


# -- engines at work -------------------------------------------------------------------------------------------


def test_a_request_with_a_source_is_an_ordinary_hit() -> None:
    with driven(fake_engine(), fake_engine()) as (source, target):
        assert source.answer(ask("a", PROMPT)) == (expected(), 0)
        assert target.answer(ask("b", PROMPT, source.engine)) == (expected(), 44)
        stats = target.engine.stats()
        assert (stats.kv_fetches, stats.kv_blocks_fetched, stats.kv_fetch_failures) == (1, 11, 0)
        assert stats.kv_bytes_fetched == 11 * 32 and source.engine.stats().kv_blocks_sent == 11


def test_the_source_computes_the_prompt_and_sends_each_chunk_once_published() -> None:
    """The first blocks arrive before the last chunk is computed."""
    slow = fake_engine({"step_delay": 0.05, **LONG})
    with driven(slow, fake_engine()) as (source, target):
        tokens, hit = target.answer(ask("a", PROMPT, slow, computes=True))
        assert (tokens, hit) == (expected(), 44)
        assert source.engine.stats().step_tokens == 44  # and no token more
        assert target.engine.stats().step_tokens == 1 + 5
        assert not source.engine.has_work


def test_blocks_travel_while_the_next_chunk_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, steps = fake_engine({"step_delay": 0.05, **LONG}), list[int]()
    with driven(slow, fake_engine()) as (_, target):
        accept = Incoming.accept

        def noting(self: Incoming, number: int, block: object) -> bool:
            steps.append(slow.stats().step_tokens)
            return accept(self, number, block)  # type: ignore[arg-type]

        monkeypatch.setattr(Incoming, "accept", noting)
        target.answer(ask("a", PROMPT, slow, computes=True))
        assert steps[0] < 44 and len(steps) == 11


def test_a_prompt_for_another_engine_takes_its_turn_beside_streams_and_other_prompts() -> None:
    with driven(fake_engine(), fake_engine()) as (source, target):
        source.add(ask("stream", [1, 2, 3], max_tokens=50))
        source.add(ask("prompt", [4] * 40, max_tokens=2))
        assert target.answer(ask("a", PROMPT, source.engine, computes=True)) == (expected(), 44)


@pytest.mark.parametrize("computes", [False, True])
def test_an_engine_that_is_not_there_costs_a_hit_and_no_error(computes: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with driven(fake_engine()) as (target,):
        assert target.answer(ask("a", PROMPT, address, computes=computes)) == (expected(), 0)
        assert target.answer(ask("b", PROMPT[1:], "nonsense", computes=computes))[0] == expected(PROMPT[1:])
        assert target.engine.stats().kv_fetch_failures == 2


@pytest.mark.parametrize(("secret", "version"), [(b"x" * 32, "v"), (bytes(range(32)), "other")])
def test_another_deployment_or_artifact_gives_nothing(secret: bytes, version: str) -> None:
    with (
        driven(fake_engine(), secret=secret, version=version) as (source,),
        driven(fake_engine()) as (target,),
    ):
        source.answer(ask("a", PROMPT))
        assert target.answer(ask("b", PROMPT, source.engine)) == (expected(), 0)
        assert target.engine.stats().kv_fetch_failures == 1


def test_a_silent_source_is_left_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.fleet import peers

    monkeypatch.setattr(peers, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(peers, "CONNECT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, driven(fake_engine()) as (target,):
        start = time.monotonic()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert target.answer(ask("a", PROMPT, address)) == (expected(), 0)
        assert time.monotonic() - start < 5.0


def test_a_stalled_source_is_left_with_the_blocks_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.fleet import peers

    monkeypatch.setattr(peers, "LEAST_SECONDS", 0.2)
    send = Channel.send_block

    def stalling(self: Channel, number: int, block: object) -> None:
        if number == 5:
            time.sleep(2.0)
        send(self, number, block)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "send_block", stalling)
    with driven(fake_engine(), fake_engine()) as (source, target):
        source.answer(ask("a", PROMPT))
        assert target.answer(ask("b", PROMPT, source.engine)) == (expected(), 20)


def test_a_source_that_dies_in_the_middle_leaves_the_blocks_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = Channel.send_block

    def dying(self: Channel, number: int, block: object) -> None:
        if number == 4:
            self.sock.shutdown(socket.SHUT_RDWR)
        send(self, number, block)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "send_block", dying)
    for computes in (False, True):
        with driven(fake_engine(), fake_engine()) as (source, target):
            source.answer(ask("a", PROMPT))
            assert target.answer(ask("b", PROMPT, source.engine, computes=computes)) == (expected(), 16)


def test_a_corrupt_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of the KV changes on its way, after the checksum was made."""
    send = Channel._send_all

    def flipping(self: Channel, parts: list[bytes | memoryview]) -> None:
        if len(parts) == 3 and bytes(parts[1][:8]) == np.int64(PROMPT[12]).tobytes():
            parts[1] = bytes(parts[1][:1]) + bytes([parts[1][1] ^ 4]) + bytes(parts[1][2:])
        send(self, parts)

    monkeypatch.setattr(Channel, "_send_all", flipping)
    with driven(fake_engine(), fake_engine()) as (source, target):
        source.answer(ask("a", PROMPT))
        assert target.answer(ask("b", PROMPT, source.engine)) == (expected(), 12)
        assert target.engine.stats().kv_blocks_rejected == 1


def test_a_client_that_leaves_ends_the_computing_for_it() -> None:
    gate = threading.Event()
    slow = fake_engine({"step_delay": 0.02, **LONG})
    with driven(slow, fake_engine()) as (source, target):
        peers = target.engine.peers
        assert peers is not None
        assert peers.fetch(ask("a", PROMPT, slow, computes=True), lambda request: gate.set())
        while not slow.scheduler.running:
            time.sleep(0.001)
        assert peers.abort("a") and not peers.abort("a")
        while slow.has_work:
            time.sleep(0.001)
        assert source.engine.stats().step_tokens < 44
        assert not gate.is_set()
        while slow.scheduler.kv.leases.tables or target.engine.scheduler.kv.leases.tables:
            time.sleep(0.001)


def test_many_requests_fetch_at_once_while_both_engines_work() -> None:
    prompts = [[number + 1, *range(1, 40 + number % 5)] for number in range(12)]
    with driven(fake_engine({"num_blocks": 120}), fake_engine({"num_blocks": 120})) as (source, target):
        for number, prompt in enumerate(prompts):
            source.answer(ask(f"{number}", prompt))
        for number, prompt in enumerate(prompts):
            target.add(ask(f"b{number}", prompt, source.engine, computes=number % 3 == 0))
            source.add(ask(f"s{number}", prompt[::-1]))
        for number, prompt in enumerate(prompts):
            assert target.answer(ask(f"c{number}", prompt))[0] == expected(prompt)


def test_an_engine_that_leaves_hands_its_prefixes_on() -> None:
    with driven(fake_engine(), fake_engine()) as (source, target):
        for number in range(3):
            source.answer(ask(f"{number}", [number + 1, *PROMPT[:20]]))
        peers = target.engine.peers
        assert peers is not None and source.engine.peers is not None
        peers.take_over(source.engine.peers.address, 1 << 20)
        while target.engine.stats().kv_fetches < 1:
            time.sleep(0.001)
        for number in range(3):
            assert target.answer(ask(f"{number}", [number + 1, *PROMPT[:20]]))[1] == 20
        peers.take_over("127.0.0.1:1", 1 << 20)  # nobody there: a line in the log
        assert target.answer(ask("last", PROMPT))[0] == expected()


def test_adoption_needs_no_request() -> None:
    adoption = Adoption(BlockExchange(engine()))
    adoption.close()
    adoption.close()

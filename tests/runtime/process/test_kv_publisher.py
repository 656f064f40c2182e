"""KV events over ZMQ: a receiver sees the blocks of an engine, and gets lost messages again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from optkit.errors import UserError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.runtime.process.client import EngineClient
from optkit.runtime.process.kv_publisher import END, publish
from optkit.runtime.report import Mark
from optkit.runtime.types import SamplingParams
from tests.support.engine_process import FACTORY, request
from tests.support.fakes import fake_engine

ONE = SamplingParams(max_tokens=1, temperature=0.0)
PATIENCE_MS = 20_000


def config(folder: Path, **more: Any) -> str:
    return json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events", **more})


def test_nothing_is_published_unless_asked_for() -> None:
    engine = fake_engine()
    assert publish(engine, "{}") is None
    assert engine.scheduler.kv.log.listener is None


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"num_state_slots": 2, "max_num_seqs": 2}]
)
def test_engines_without_such_events_refuse(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="KV events"):
        publish(fake_engine(options=options), config(tmp_path))


@pytest.fixture
def zmq() -> Any:
    return pytest.importorskip("zmq")


@pytest.fixture
def receiver(zmq: Any, tmp_path: Path) -> Iterator[Any]:
    """A connected SUB socket; ZMQ connects before the other side binds."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    socket.connect(f"ipc://{tmp_path}/events")
    yield socket
    socket.close(linger=0)


def serve(engine: Engine, prompt: list[int]) -> None:
    engine.generate([prompt], ONE)


def test_a_receiver_follows_the_blocks_of_an_engine(receiver: Any, tmp_path: Path) -> None:
    engine = fake_engine(options={"num_blocks": 8})
    publisher = publish(engine, config(tmp_path, topic="kv", replay_endpoint=f"ipc://{tmp_path}/replay"))
    assert publisher is not None
    held: set[int] = set()
    numbers: list[int] = []
    time.sleep(0.3)  # the subscription travels to the publisher
    for start in range(1, 40, 6):
        serve(engine, list(range(start, start + 13)))
    engine.reset_prefix_cache()
    serve(engine, list(range(1, 14)))
    expected = {int.from_bytes(digest[:8], "big") for digest in engine.report(Mark()).changes.added}
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while held != expected and time.monotonic() < deadline:
        if receiver.poll(200):
            topic, number, body = receiver.recv_multipart()
            assert topic == b"kv"
            numbers.append(int.from_bytes(number, "big"))
            for event in msgspec.msgpack.decode(body)[1]:
                if event["type"] == "BlockStored":
                    assert len(event["token_ids"]) == 4 * len(event["block_hashes"])
                    held |= set(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    held -= set(event["block_hashes"])
                else:
                    held.clear()
    assert held == expected and len(expected) == 3
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a message was lost"
    publisher.close()


def test_messages_are_sent_again_on_request(zmq: Any, tmp_path: Path) -> None:
    engine = fake_engine()
    publisher = publish(engine, config(tmp_path, replay_endpoint=f"ipc://{tmp_path}/replay"))
    assert publisher is not None
    serve(engine, list(range(1, 14)))
    time.sleep(0.3)
    asking = zmq.Context.instance().socket(zmq.DEALER)  # one question, many answers
    asking.connect(f"ipc://{tmp_path}/replay")
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    while asking.poll(PATIENCE_MS):
        _, number, body = asking.recv_multipart()
        if number == END:
            break
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(body)[1]))
    assert [number for number, _ in found] == list(range(len(found))) and len(found) >= 2
    assert found[0][1] == [{"type": "AllBlocksCleared"}]
    asking.close(linger=0)
    publisher.close()


def test_an_endpoint_in_use_is_one_clear_error(zmq: Any) -> None:
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    taken = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"})
    with pytest.raises(UserError, match="endpoint can't be used"):
        publish(fake_engine(), taken)
    socket.close(linger=0)


def test_an_engine_process_publishes_as_its_options_ask(receiver: Any, tmp_path: Path) -> None:
    """From the option to the wire, and a wrong value is the user's error."""

    async def main() -> None:
        options = EngineOptions(kv_events_config=config(tmp_path, topic="kv"))
        engine = EngineClient(json.dumps({}), options, factory=FACTORY)
        await engine.start(60.0)
        try:
            await asyncio.sleep(0.3)  # the subscription travels to the publisher
            stream = [out async for out in engine.generate(request("r", list(range(1, 14)), max_tokens=1))]
            assert stream[-1].finish_reason
            stored: set[int] = set()
            while len(stored) < 3 and await asyncio.to_thread(receiver.poll, PATIENCE_MS):
                for event in msgspec.msgpack.decode(receiver.recv_multipart()[2])[1]:
                    stored |= set(event.get("block_hashes", ()))
            assert len(stored) == 3
        finally:
            await engine.stop()
        wrong = EngineClient(json.dumps({}), EngineOptions(kv_events_config="{no"), factory=FACTORY)
        with pytest.raises(UserError, match="malformed"):
            await wrong.start(60.0)

    asyncio.run(main())

"""KV events on the wire, against a message of vLLM 0.26 as its receivers print it."""

from __future__ import annotations

import msgspec
import pytest

from optkit.errors import UserError
from optkit.runtime.kv.events import (
    AllBlocksCleared,
    EventBatch,
    KVEventsConfig,
    events_of,
    for_rank,
    hash_of,
    parse_config,
)
from optkit.runtime.kv.prefix_cache import COMMON_SALT, Node

FIRST = Node((15760518052499183552).to_bytes(8, "big") + bytes(24), "", (1, 2))
SECOND = Node(b"\1" * 32, FIRST, (3, 4))
THIRD = Node(b"\2" * 32, SECOND, (5, 6))
OTHER = Node(b"\3" * 32, "tenant", (7, 8))
BAKED = Node(b"\4" * 32, COMMON_SALT, (9, 9))


def on_the_wire(*changes: tuple[Node, bool]) -> list[object]:
    """The events of a message, decoded without types."""
    body = msgspec.msgpack.encode(EventBatch(1789095808.5, events_of(changes)))
    time, events, rank = msgspec.msgpack.decode(body)
    assert (time, rank) == (1789095808.5, 0)
    return events


def test_a_stored_block_has_the_fields_of_vllm() -> None:
    (event,) = on_the_wire((FIRST, True))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [15760518052499183552],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_blocks_of_a_path_are_one_event_and_name_the_block_before() -> None:
    first, second = on_the_wire((SECOND, True), (THIRD, True), (OTHER, True))
    assert first["block_hashes"] == [hash_of(SECOND.digest), hash_of(THIRD.digest)]
    assert first["parent_block_hash"] == hash_of(FIRST.digest)
    assert first["token_ids"] == [3, 4, 5, 6] and first["extra_keys"] == [None, None]
    assert second["parent_block_hash"] is None and second["extra_keys"] == [["tenant"]]


def test_changes_keep_their_order() -> None:
    events = on_the_wire((FIRST, True), (FIRST, False), (OTHER, False), (FIRST, True), (BAKED, True))
    assert [event["type"] for event in events] == [
        "BlockStored",
        "BlockRemoved",
        "BlockStored",
        "BlockStored",
    ]
    assert events[1] == {
        "type": "BlockRemoved",
        "block_hashes": [hash_of(FIRST.digest), hash_of(OTHER.digest)],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert events[3]["extra_keys"] == [None], "a prefix of the artifact has no salt"


def test_the_first_event_of_an_engine_clears_what_receivers_knew() -> None:
    body = msgspec.msgpack.encode(EventBatch(1.0, [AllBlocksCleared()]))
    assert msgspec.msgpack.decode(body) == [1.0, [{"type": "AllBlocksCleared"}], 0]


def test_the_configuration_has_the_names_of_vllm() -> None:
    found = parse_config('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@pod@model"}')
    assert found.is_on and found.binds and found.endpoint == "tcp://*:5557" and found.topic == "kv@pod@model"
    assert not parse_config("{}").is_on
    assert not parse_config('{"enable_kv_cache_events": true, "publisher": "null"}').is_on
    assert not KVEventsConfig(endpoint="tcp://router:5557").binds


@pytest.mark.parametrize("text", ["", "[]", '{"enable": true}', '{"hwm": "x"}', '{"publisher": "kafka"}'])
def test_a_wrong_configuration_is_one_clear_error(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(text)
    assert error.value.where == "--kv-events-config" and "enable_kv_cache_events" in str(error.value.fix)


def test_replicas_of_a_machine_bind_ports_of_their_own() -> None:
    text = '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6000", "topic": "t"}'
    second = parse_config(for_rank(text, 1))
    assert (second.endpoint, second.replay_endpoint, second.topic) == ("tcp://*:5558", "tcp://*:6001", "t")
    assert parse_config(for_rank(text, 0)) == parse_config(text)
    assert parse_config(for_rank('{"endpoint": "ipc:///run/kv"}', 2)).endpoint == "ipc:///run/kv_dp2"
    there = '{"endpoint": "tcp://router:5557"}'
    assert for_rank(there, 3) == there, "receivers listen at one port"

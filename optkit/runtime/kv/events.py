"""KV events in vLLM's format, for routers outside of optkit (llm-d, AIBrix, Dynamo).

A message is msgpack: an array of the time, the events and the rank; an event is a map with its ``type``, as vLLM
0.26 sends (before mid-2026 events were arrays, too). ``BlockStored`` names blocks a prompt can take over from now on,
``BlockRemoved`` those it cannot any more, as ``optkit.runtime.kv.changes`` defines. Hashes are the first 8 bytes of the
digests: opaque numbers, as a receiver makes its own keys from the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

import msgspec

from optkit.errors import UserError
from optkit.runtime.kv.digests import COMMON_SALT
from optkit.runtime.kv.prefix_cache import Node

OPTION = "--kv-events-config"
HASH_BYTES = 8
MEDIUM, KIND = (
    "GPU",
    "full_attention",
)  # vLLM's names for the pool, on any device, and for layers without a window


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The publishing of KV events, with vLLM's names and defaults.

    Attributes:
        publisher: "null" publishes nothing; by default "zmq" where events are enabled.
        endpoint: of a PUB socket; bound with ``*``, ``::``, ipc or inproc in the name, else connected.
        replay_endpoint: of a ROUTER socket that sends the last messages again.
        buffer_steps: messages kept for that.
        hwm: messages that wait for a slow receiver; further ones are lost to the receiver.
        max_queue_size: changes of blocks that wait for the publisher.
        topic: first part of each message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """True where events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """True where the PUB socket is bound, False where it connects to the receiver."""
        return any(mark in self.endpoint for mark in ("*", "::", "ipc://", "inproc://"))


def parse_config(text: str) -> KVEventsConfig:
    """The value of ``--kv-events-config``, a JSON object.

    Raises:
        UserError: no such object.
    """
    try:
        return msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        example = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"})
        raise UserError(str(error).replace("`", ""), where=OPTION, fix=f"write it as '{example}'") from error


def for_rank(text: str, rank: int) -> str:
    """The value of ``--kv-events-config`` for a replica: a bound port is the base port and ``rank``, as in vLLM.

    Args:
        rank: of the replica on its machine, from 0.
    """
    config = parse_config(text)
    if not config.binds:
        return text
    moved = {
        name: _moved(value, rank)
        for name in ("endpoint", "replay_endpoint")
        if (value := getattr(config, name)) is not None
    }
    return msgspec.json.encode(msgspec.structs.replace(config, **moved)).decode()


def _moved(endpoint: str, rank: int) -> str:
    """``endpoint`` with the port of ``rank``; another name where there is no port."""
    head, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdecimal():
        return f"{head}{colon}{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other on a path."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that are gone."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks are gone; the first event of an engine."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """A message. ``ts`` is seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


def hash_of(digest: bytes) -> int:
    """The hash of a block, an unsigned number of 64 bits."""
    return int.from_bytes(digest[:HASH_BYTES], "big")


def events_of(changes: Iterable[tuple[Node, bool]]) -> list[Event]:
    """The events of nodes that began (True) or ceased (False) to be held, in order."""
    events: list[Event] = []
    last: Node | None = None  # of the run of blocks in the last event
    for node, held in changes:
        before = events[-1] if events else None
        if held and isinstance(before, BlockStored) and node.parent is last:
            before.block_hashes.append(hash_of(node.digest))
            before.token_ids += node.tokens
            if before.extra_keys is not None:
                before.extra_keys.append(None)
        elif held:
            events.append(_stored(node))
        elif isinstance(before, BlockRemoved):
            before.block_hashes.append(hash_of(node.digest))
        else:
            events.append(BlockRemoved([hash_of(node.digest)], MEDIUM, 0))
        last = node if held else None
    return events


def _stored(node: Node) -> BlockStored:
    parent = node.parent if isinstance(node.parent, Node) else None
    salt = node.parent if isinstance(node.parent, str) and node.parent != COMMON_SALT else ""
    return BlockStored(
        block_hashes=[hash_of(node.digest)],
        parent_block_hash=None if parent is None else hash_of(parent.digest),
        token_ids=list(node.tokens),
        block_size=len(node.tokens),
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[(salt,) if salt else None],
        group_idx=0,
        kv_cache_spec_kind=KIND,
    )

"""The interface of a replica, and the messages between the router, the replicas and their clients.

A replica is an engine process with a supervisor, behind Ray or in the same process (tests). All messages are
``msgspec`` structs and cross process borders as msgpack.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from optkit.runtime.kv.peers import KVSource
from optkit.runtime.report import BlockChanges, EngineReport, Mark
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput

__all__ = [
    "BlockChanges",
    "Fetch",
    "Mark",
    "Replica",
    "ReplicaGone",
    "ReplicaReport",
    "Work",
    "replica_report",
]


class ReplicaReport(EngineReport, frozen=True, kw_only=True):
    """The state of a replica, asked for a few times a second.

    Attributes:
        replica_id: unique in the fleet, for the life of the replica.
        version: digest of the artifact; replicas of different versions share neither index, transfers nor answers.
        is_ready: an engine has loaded and lives.
        is_draining: takes no new requests.
        is_held: takes only requests that ask for its version, because an update has not let clients to it yet.
        queue_seconds: predicted time from an arrival now to the request's first step.
        prefill_seconds: predicted time of prompts with 0, 256, 512, 1024 and 2048 uncached tokens, alone.
        decode_seconds: predicted time of a step with the running requests.
        num_running, num_waiting: requests.
        waiting_tokens: tokens of prompts, not computed yet.
        kv_blocks_used, kv_blocks_total: of the pool.
        kv_blocks_host: of the offload store.
        block_size: tokens of a block.
        block_bytes: of a block's KV, over all layers.
        kv_layout: digest of the meaning of a block's bytes; blocks go only between equal layouts.
        peer_address: host and port for other replicas to fetch blocks; empty: no blocks are given.
        prefill_weight: 1: any work; above 1: preferred for prompts of other replicas; 0: none of other replicas.
        holds_ends: as in ``EngineReport``.
        changes: of the published blocks after the asked mark.
        stats: gauges and counters of the engine.
        num_restarts: engines of the replica started after the first.
        is_restarting: the engine is gone, and a new engine is being started.
    """

    replica_id: str
    version: str
    is_ready: bool = True
    is_draining: bool = False
    is_held: bool = False
    kv_layout: str = ""
    peer_address: str = ""
    prefill_weight: float = 1.0
    stats: EngineStats = EngineStats()
    num_restarts: int = 0
    is_restarting: bool = False


def replica_report(engine: EngineReport, replica_id: str, version: str, **facts: Any) -> ReplicaReport:
    """The report of a replica with ``engine``; ``facts`` are further fields, such as ``is_draining``."""
    return ReplicaReport(replica_id=replica_id, version=version, **msgspec.structs.asdict(engine), **facts)


class Fetch(msgspec.Struct, frozen=True):
    """Blocks for a replica to take from another replica before the first step of a request.

    Attributes:
        source: id of the replica with the blocks.
        address: the source's ``peer_address``.
        digests: of the blocks, a run from the prompt's first wanted block on.
        computes: the source computes the prompt first and sends each block once published (prefill apart from decode);
            else the source sends only blocks in the cache.
    """

    source: str
    address: str
    digests: tuple[bytes, ...]
    computes: bool = False


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a replica.

    Attributes:
        request: for the engine; ``EngineRequest.continued`` counts the tokens of a broken answer at the prompt's end.
        digests: of all full blocks of the prompt, computed once in the API process.
        fetch: blocks to take from another replica first; None: none.
    """

    request: EngineRequest
    digests: tuple[bytes, ...] = ()
    fetch: Fetch | None = None

    @property
    def sourced(self) -> EngineRequest:
        """The request, with the source of KV in ``fetch``."""
        if self.fetch is None:
            return self.request
        source = KVSource(address=self.fetch.address, computes=self.fetch.computes)
        return msgspec.structs.replace(self.request, source=source)


class ReplicaGone(Exception):
    """A replica, its engine or its node ended before the last token of an answer.

    Attributes:
        was_begun: the engine had begun to compute the request, so the request may be the cause.
        replica_id: of the replica; empty: no replica was there to ask.
    """

    def __init__(self, reason: str, *, was_begun: bool, replica_id: str = "") -> None:
        super().__init__(reason)
        self.was_begun, self.replica_id = was_begun, replica_id


class Replica(Protocol):
    """A replica, local or remote."""

    @property
    def replica_id(self) -> str: ...

    def generate(self, work: Work) -> AsyncIterator[TokenOutput]:
        """Outputs until an output has a ``finish_reason``; raises ReplicaGone. Closing the generator aborts."""
        ...

    async def report(self, since: Mark) -> ReplicaReport:
        """The state, with the changes of the blocks after ``since``; raises ReplicaGone."""
        ...

    async def drain(self) -> None:
        """Take no new requests; return at the end of the last running request."""
        ...

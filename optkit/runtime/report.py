"""Reports of an engine for a router: predicted seconds, load, and changes of the cached blocks."""

from __future__ import annotations

import msgspec

PREFILL_TOKENS = (0, 256, 512, 1024, 2048)  # of ``EngineReport.prefill_seconds``


class Mark(msgspec.Struct, frozen=True):
    """A place in the history of a replica's prefix cache.

    Attributes:
        epoch: of the engine process; another epoch starts with an empty cache.
        sequence: the number of changes since the epoch began.
    """

    epoch: str = ""
    sequence: int = 0


class BlockChanges(msgspec.Struct, frozen=True):
    """The changes of a replica's published blocks after a mark.

    Attributes:
        mark: the place after these changes.
        is_snapshot: ``added`` has all blocks of the replica, because the asked mark was of another epoch or too old.
        added, dropped: digests of full blocks (``PrefixCache.digests``), in order; no digest is in both.
    """

    mark: Mark
    is_snapshot: bool = False
    added: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine between two steps or in a step. ``optkit.fleet.replica.ReplicaReport`` explains the names.

    Attributes:
        holds_ends: a digest in ``changes`` is the end of a prefix that a prompt can take over, and the blocks before
            are not listed (models with a recurrent state); else a prompt takes over a run of listed blocks.
    """

    queue_seconds: float = 0.0
    prefill_seconds: tuple[float, ...] = ()
    decode_seconds: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_host: int = 0
    block_size: int = 32
    block_bytes: int = 0
    holds_ends: bool = False
    changes: BlockChanges | None = None

"""Hand-over: the hot blocks of a leaving replica go to another replica."""

from __future__ import annotations

from collections.abc import Collection

from optkit.fleet.replica import ReplicaReport

HAND_OVER_SECONDS = 2.0  # a replica with KV to give lives at least so long after it began to drain
HAND_OVER_SHARE = 0.25  # of the heir's pool: more would push out prefixes of its own


def heir(leaving: ReplicaReport, others: Collection[ReplicaReport]) -> ReplicaReport | None:
    """The replica to take the blocks of ``leaving``: with the most room in the pool; None where there is none."""
    able = [each for each in others if not each.is_draining and each.is_ready and gives_blocks(leaving, each)]
    return max(able, key=lambda each: each.kv_blocks_total - each.kv_blocks_used, default=None)


def budget(target: ReplicaReport) -> int:
    """The most bytes of KV to hand over to ``target``."""
    return int(HAND_OVER_SHARE * target.kv_blocks_total) * target.block_bytes


def gives_blocks(source: ReplicaReport, target: ReplicaReport) -> bool:
    """True where ``target`` can take blocks from ``source``."""
    mine = target.version, target.kv_layout, target.block_size
    theirs = source.version, source.kv_layout, source.block_size
    return bool(source.is_ready and source.peer_address and target.kv_layout) and mine == theirs

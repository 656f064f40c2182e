"""Leases: blocks of the prefix cache held for a while, for a copy to or from another replica.

A lease is an owner of blocks like a block table, so eviction passes the blocks by. A lease ends after a time, unless
renewed. Room for a request goes first: all leases end where a request would find no block (``Leases.give_way``). A copy
reads and writes only while the tables stand still, so the end of a lease costs a later copy and never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optkit.runtime.kv.blocks import BlockManager


@dataclass(eq=False)
class Lease:
    """Blocks held until ``end``, the first of a path first."""

    end: float
    blocks: list[int] = field(default_factory=list)


class Leases:
    """The leases of a pool."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._leases: list[Lease] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def tables(self) -> list[list[int]]:
        """The blocks of each lease."""
        return [lease.blocks for lease in self._leases]

    def open(self, end: float) -> Lease:
        """A new lease without blocks."""
        lease = Lease(end)
        self._leases.append(lease)
        return lease

    def hold(self, lease: Lease, blocks: Sequence[int]) -> None:
        """Add used or cached ``blocks`` to ``lease``; nothing happens after the end."""
        if lease in self._leases:
            for block in blocks:
                self._blocks.share(block)
                lease.blocks.append(block)

    def renew(self, lease: Lease, end: float) -> bool:
        """Let ``lease`` last until ``end``; False where the lease has ended."""
        lease.end = end
        return lease in self._leases

    def close(self, lease: Lease) -> None:
        """End ``lease``; the blocks are the most recently used afterwards. Closing twice is harmless."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._blocks.free(lease.blocks)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        for lease in [lease for lease in self._leases if lease.end <= now]:
            self.close(lease)

    def give_way(self) -> bool:
        """End all leases; False where there is none."""
        ended = list(self._leases)
        for lease in ended:
            self.close(lease)
        return bool(ended)

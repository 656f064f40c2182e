"""Log of changes: the blocks that prompts began or ceased to find in the prefix cache, for routers.

A digest is *held* while a prompt can take the node over:

- KV of the layers without a window is in the pool or in the offload store. An offloaded block counts, because a block
  is saved only where loading is cheaper than computing. Of a model with windows alone, KV of any window counts.
- The KV of windows is not looked at: a prompt that leaves a path before the end of the path may find the window lost,
  and computes it again.
- Of a model with a recurrent state, nodes with a checkpoint are held, and no others: a hit ends at a checkpoint.

The log is a ring: a question for changes that have left the ring, or of another process, is answered with a snapshot.
A ring longer than the pool would be no use, as a snapshot is then the shorter answer. Without questions the log costs
an entry for each change of a block, far below a microsecond.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from optkit.runtime.kv.prefix_cache import Node
from optkit.runtime.report import BlockChanges, Mark

LEAST_ENTRIES, MOST_ENTRIES = 1024, 1 << 16
MOST_LISTED = 1 << 19  # digests of a snapshot, which has to fit a message


class ChangeLog:
    """The last changes of the held digests.

    Args:
        num_blocks: of the pool and the offload store.

    Attributes:
        listener: called with each node that begins (True) or ceases (False) to be held.
    """

    def __init__(self, num_blocks: int) -> None:
        self._epoch = os.urandom(8).hex()
        self._sequence = 0
        self._entries: deque[tuple[bytes, bool]] = deque(
            maxlen=min(max(num_blocks, LEAST_ENTRIES), MOST_ENTRIES)
        )
        self.listener: Callable[[Node, bool], None] | None = None

    @property
    def mark(self) -> Mark:
        """The place after the last change."""
        return Mark(self._epoch, self._sequence)

    def record(self, node: Node, held: bool) -> None:
        """Add a change: ``node`` is ``held`` from now on, or no more."""
        node.is_held = held
        self._sequence += 1
        self._entries.append((node.digest, held))
        if self.listener is not None:
            self.listener(node, held)

    def restart(self) -> None:
        """Begin a new history, after which every question is answered with a snapshot."""
        self._epoch, self._sequence = os.urandom(8).hex(), 0
        self._entries.clear()

    def since(self, mark: Mark, held: Callable[[], Iterable[bytes]]) -> BlockChanges:
        """The changes after ``mark``, or all digests.

        Args:
            held: returns the digests held now.
        """
        count = self._sequence - mark.sequence
        if mark.epoch != self._epoch or not 0 <= count <= len(self._entries):
            return BlockChanges(self.mark, is_snapshot=True, added=tuple(islice(held(), MOST_LISTED)))
        first: dict[bytes, bool] = {}
        last: dict[bytes, bool] = {}
        for digest, is_held in islice(self._entries, len(self._entries) - count, None):
            first.setdefault(digest, is_held)
            last[digest] = is_held
        changed = {digest: is_held for digest, is_held in last.items() if first[digest] == is_held}
        added = tuple(digest for digest, is_held in changed.items() if is_held)
        dropped = tuple(digest for digest, is_held in changed.items() if not is_held)
        return BlockChanges(self.mark, added=added, dropped=dropped)

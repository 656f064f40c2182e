"""Index: the blocks that each replica holds, as far as the router knows.

For each replica a table of keys (``optkit.fleet.digests``), filled from two sides:

- *Reports* of a replica name the changes since the last report, or all blocks (a snapshot) after a gap or a restart.
  Reported blocks stay until the replica drops them.
- *Expectations*: a request was just sent to the replica, so the replica will have the blocks of the prompt. An
  expected block is a hit for the next prompt at once, and is forgotten unless a report confirms the block in time.

A report counts from the mark in the question. Any other report would leave wrong entries, and is left out; the next
question repeats the mark. Thus a single question after a gap makes the table right.

Memory: a table is a ``dict`` from key to the time at which the entry ends (infinite for reported blocks). Entries that
ended count for nothing, and go with the next report. A replica has at most ``budget`` blocks, and expectations beyond
``budget`` go, the oldest first. So the index is bounded by the blocks of the replicas, and a replica without requests
costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from optkit.fleet.digests import Blocks, key_of
from optkit.runtime.report import BlockChanges, Mark

NEVER = -math.inf  # the end of an entry that is not there


@dataclass(slots=True)
class Table:
    """The blocks of a replica.

    Attributes:
        ends: the time at which an entry ends, by key; infinite for reported blocks.
        expected: expectations in order of sending: the time of the end, and the keys.
        num_expected: keys in ``expected``.
        holds_ends: as in ``optkit.runtime.report.EngineReport``.
    """

    mark: Mark = field(default_factory=Mark)
    ends: dict[int, float] = field(default_factory=dict)
    expected: deque[tuple[float, Sequence[int]]] = field(default_factory=deque)
    num_expected: int = 0
    holds_ends: bool = False

    def drop_oldest_expectation(self) -> None:
        """Forget the blocks of the oldest expectation, but for later expectations and reported blocks."""
        until, keys = self.expected.popleft()
        self.num_expected -= len(keys)
        ends = self.ends
        for key in keys:
            if ends.get(key) == until:
                del ends[key]


class Index:
    """The tables of all replicas. Times are seconds of any clock that does not jump."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}

    def __len__(self) -> int:
        """The number of entries of all replicas."""
        return sum(len(table.ends) for table in self._tables.values())

    def mark(self, replica_id: str) -> Mark:
        """The place in the replica's history up to which the table is right, for the next question."""
        table = self._tables.get(replica_id)
        return Mark() if table is None else table.mark

    def knows(self, key: int) -> bool:
        """True for a block of any replica."""
        return any(key in table.ends for table in self._tables.values())

    def apply(
        self,
        replica_id: str,
        changes: BlockChanges,
        since: Mark,
        *,
        budget: int,
        now: float,
        holds_ends: bool = False,
    ) -> bool:
        """Take in a replica's changes after ``since``; False for changes that do not fit, which are left out.

        Args:
            budget: the most blocks of the replica.
        """
        table = self._tables.setdefault(replica_id, Table())
        table.holds_ends = holds_ends
        while table.expected and table.expected[0][0] < now:
            table.drop_oldest_expectation()
        if changes.is_snapshot:
            waiting = {key: until for key, until in table.ends.items() if until != math.inf}
            table.ends = waiting | dict.fromkeys(map(key_of, changes.added), math.inf)
        elif since != table.mark or changes.mark.epoch != since.epoch:
            return False
        else:
            for digest in changes.added:
                table.ends[key_of(digest)] = math.inf
            for digest in changes.dropped:
                if table.ends.get(key_of(digest)) == math.inf:
                    del table.ends[key_of(digest)]
        table.mark = changes.mark
        excess = len(table.ends) - table.num_expected - budget
        if excess > 0:  # a replica can hold no more: the oldest entries are the least certain
            table.ends = dict(itertools.islice(table.ends.items(), excess, None))
        return True

    def expect(self, replica_id: str, keys: Sequence[int], until: float, *, budget: int) -> None:
        """Count the blocks of a prompt just sent to a replica as the replica's, up to the time ``until``."""
        table = self._tables.setdefault(replica_id, Table())
        ends = table.ends
        for key in keys:
            if ends.get(key, NEVER) < until:
                ends[key] = until
        table.expected.append((until, keys))
        table.num_expected += len(keys)
        while table.num_expected > budget:
            table.drop_oldest_expectation()

    def disappoint(self, replica_id: str, keys: Sequence[int], until: float) -> None:
        """Take back an expectation: the prompt will not be computed there."""
        table = self._tables.get(replica_id)
        for key in keys if table is not None else ():
            if table is not None and table.ends.get(key) == until:
                del table.ends[key]

    def forget(self, replica_id: str) -> None:
        """Drop the table of a replica: gone, or with another version."""
        self._tables.pop(replica_id, None)

    def hits(self, replica_id: str, blocks: Blocks, now: float) -> tuple[int, int]:
        """The number of first blocks of a prompt that the replica holds, and of those in the replica's reports."""
        table = self._tables.get(replica_id)
        if table is None or not table.ends:
            return 0, 0
        found = self._held(table, blocks, now)
        if found and table.ends.get(blocks.keys[found - 1]) != math.inf:
            return found, min(found, self._held(table, blocks, math.inf))
        return found, found

    def _held(self, table: Table, blocks: Blocks, now: float) -> int:
        """The number of first blocks held; with ``now`` infinite only reported ones count."""
        if table.holds_ends:
            return self._last_end(table, blocks, now)
        start = _run(table.ends, blocks.common, 0, now) if blocks.common else 0
        return _run(table.ends, blocks.keys, start, now)

    def _last_end(self, table: Table, blocks: Blocks, now: float) -> int:
        """The blocks up to the last listed block."""
        return max(
            (
                count
                for keys in (blocks.keys, blocks.common)
                for count, key in enumerate(keys, 1)
                if table.ends.get(key, NEVER) >= now
            ),
            default=0,
        )


def _run(ends: dict[int, float], keys: Sequence[int], start: int, now: float) -> int:
    """The end of the run of held ``keys`` from ``start`` on, by bisection.

    A cache loses a path from the end, so the held keys come first. Where a block in the middle was lost (a failed copy)
    the run is taken for longer, and the prompt for faster.
    """
    low, high, middle = start, len(keys), start  # the first look decides for most prompts
    while low < high:
        if ends.get(keys[middle], NEVER) >= now:
            low = middle + 1
        else:
            high = middle
        middle = (low + high) // 2
    return low

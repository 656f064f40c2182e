"""The sum of the engines' gauges and counters, as of a single engine.

A falling counter is a restart to Prometheus. So the counts of lost replicas and of replaced engines stay in the sum.
"""

from __future__ import annotations

from itertools import zip_longest

from optkit.runtime.types import EngineStats

GAUGES = (
    "num_running",
    "num_waiting",
    "num_deferred",
    "kv_blocks_used",
    "kv_blocks_cached",
    "kv_blocks_total",
    "kv_blocks_offloaded",
    "kv_blocks_pinned",
    "state_slots_used",
    "checkpoints_used",
)
COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in GAUGES)

Count = int | tuple[int, ...]


def plus(a: Count, b: Count) -> Count:
    """The sum of two counts, or of two rows of counts of any lengths."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    raise TypeError("a count and a row of counts have no sum")


class Totals:
    """Sums over replicas; ``set`` and ``drop`` tell of their stats and their end."""

    def __init__(self) -> None:
        self._present: dict[str, tuple[EngineStats, int]] = {}
        self._past = EngineStats()
        self._past_restarts = 0

    def set(self, replica_id: str, stats: EngineStats, num_restarts: int = 0) -> None:
        """Take the stats of a replica. The counts of a new engine begin at 0; a dead engine has none."""
        before = self._present.get(replica_id)
        if before is not None and _fell(before[0], stats):
            self._past = _sum(self._past, before[0], COUNTERS)
        self._present[replica_id] = stats, num_restarts

    def drop(self, replica_id: str) -> None:
        """Keep the counts of a lost replica, without the gauges."""
        stats, num_restarts = self._present.pop(replica_id, (EngineStats(), -1))
        self._past = _sum(self._past, stats, COUNTERS)
        self._past_restarts += num_restarts + 1  # the replica's engine is replaced by another replica's

    @property
    def stats(self) -> EngineStats:
        """The sum of all."""
        found = self._past
        for stats, _ in self._present.values():
            found = _sum(found, stats, EngineStats.__struct_fields__)
        return found

    @property
    def num_restarts(self) -> int:
        """Engines started in the place of others, in a replica or as a new replica."""
        return self._past_restarts + sum(count for _, count in self._present.values())


def _fell(before: EngineStats, now: EngineStats) -> bool:
    """True when a count is smaller than before."""
    pairs = ((getattr(before, name), getattr(now, name)) for name in COUNTERS)
    return any(b > a if isinstance(b, int) else sum(b) > sum(a) for b, a in pairs)


def _sum(a: EngineStats, b: EngineStats, names: tuple[str, ...]) -> EngineStats:
    """``a`` with the fields ``names`` of ``b`` added."""
    values = {name: getattr(a, name) for name in EngineStats.__struct_fields__}
    values |= {name: plus(values[name], getattr(b, name)) for name in names}
    return EngineStats(**values)

"""The choice of a replica for a request: the interface of a router, and the least queue as the simplest router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from optkit.fleet.replica import Fetch, ReplicaReport


@dataclass(frozen=True)
class Decision:
    """The replica of a request.

    Attributes:
        replica_id: of the chosen replica.
        fetch: blocks for the replica to take from another replica first.
        reason: the numbers behind the choice, in one line for the log.
    """

    replica_id: str
    fetch: Fetch | None = None
    reason: str = ""


class Router(Protocol):
    """Chooses replicas by their reports. All calls come from one event loop; none waits."""

    def choose(
        self, digests: Sequence[bytes], num_tokens: int, reports: Collection[ReplicaReport]
    ) -> Decision:
        """The replica for a prompt; the request is sent after the return.

        Args:
            digests: of the full blocks of the prompt; empty where no digests are computed.
            num_tokens: of the prompt.
            reports: the latest report of each replica that may be chosen, at least one.
        """
        ...

    def observe(self, report: ReplicaReport) -> None:
        """Take a new report, with the changes of the replica's blocks since the report before."""
        ...

    def forget(self, replica_id: str) -> None:
        """Drop all knowledge of a replica that is gone."""
        ...


class LeastQueue:
    """The replica with the fewest requests: those of the last report, and those sent since."""

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()

    def choose(
        self, digests: Sequence[bytes], num_tokens: int, reports: Collection[ReplicaReport]
    ) -> Decision:
        queues = {report.replica_id: self._queue(report) for report in reports}
        chosen = min(queues, key=lambda name: (queues[name], name))
        self._sent[chosen] += 1
        return Decision(chosen, reason=f"least queue: {queues[chosen]} of {sorted(queues.values())}")

    def _queue(self, report: ReplicaReport) -> int:
        return report.num_running + report.num_waiting + self._sent[report.replica_id]

    def observe(self, report: ReplicaReport) -> None:
        self._sent.pop(report.replica_id, None)

    def forget(self, replica_id: str) -> None:
        self._sent.pop(replica_id, None)

"""Scores: the predicted time to first token of a prompt at each replica.

    predicted = queue + prefill of the uncached tokens

``queue`` is the reported forecast of the engine, less the time since the report, plus the prefills sent since: the
work of a replica is taken as a single line, in which a prompt starts when the work before is done (``Backlog``).
``prefill`` is interpolated in the replica's own predictions, which its engine learns from measured steps. So a slow
replica and a full queue count in the same unit as a missing prefix: seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from optkit.fleet.replica import Fetch, ReplicaReport
from optkit.runtime.report import PREFILL_TOKENS

MOST_SENT = 4096  # requests of a replica without a report in between
NUM_KNOWN, LAST = len(PREFILL_TOKENS), len(PREFILL_TOKENS) - 1


def prefill_seconds(table: Sequence[float], num_tokens: int) -> float:
    """The predicted seconds of a prefill, between the reported predictions (``PREFILL_TOKENS``) and beyond the last.

    Without predictions a token counts as a microsecond, so fewer uncached tokens still win.
    """
    if len(table) < NUM_KNOWN:
        return num_tokens * 1e-6
    place = bisect_left(PREFILL_TOKENS, num_tokens, 1, LAST)
    low, start = PREFILL_TOKENS[place - 1], table[place - 1]
    return start + (table[place] - start) / (PREFILL_TOKENS[place] - low) * (num_tokens - low)


@dataclass(slots=True)
class Backlog:
    """The work in front of a replica, as the time at which a new prompt would start.

    Attributes:
        free_at: the time at which the work known so far is done.
        sent: the time of sending and the seconds of each prompt sent since the last report.
    """

    free_at: float = 0.0
    sent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_SENT))

    def seconds(self, now: float) -> float:
        """The time until a prompt that arrives now would start."""
        return max(0.0, self.free_at - now)

    def send(self, seconds: float, now: float) -> None:
        """Add a prompt of ``seconds`` of prefill."""
        self.free_at = max(self.free_at, now) + seconds
        self.sent.append((now, seconds))

    def take_back(self, seconds: float, now: float, sent: float) -> bool:
        """Subtract a prompt that was sent at the time ``sent`` and is not computed; False where a report came since."""
        if (sent, seconds) not in self.sent:
            return False
        self.sent.remove((sent, seconds))
        self.free_at = max(now, self.free_at - seconds)
        return True

    def report(self, queue_seconds: float, asked: float) -> None:
        """Begin anew from a report on the question of the time ``asked``, and the prompts sent since."""
        while self.sent and self.sent[0][0] <= asked:
            self.sent.popleft()
        self.free_at = asked + queue_seconds
        for sent, seconds in self.sent:
            self.free_at = max(self.free_at, sent) + seconds


@dataclass(slots=True)
class Candidate:
    """A replica that may take a prompt, with the predicted parts of the time to first token in seconds.

    Attributes:
        hit_blocks, hit_tokens: of the prompt, in the replica's cache when the prompt would start: reported, or expected
            from prompts sent before.
        reported_blocks: of ``hit_blocks``, those of reports, which other replicas can fetch now.
    """

    report: ReplicaReport
    hit_blocks: int
    hit_tokens: int
    queue: float
    prefill: float
    reported_blocks: int = 0

    @property
    def replica_id(self) -> str:
        return self.report.replica_id

    @property
    def seconds(self) -> float:
        """The predicted time to first token."""
        return self.queue + self.prefill


@dataclass(slots=True)
class Option:
    """A way to serve a prompt.

    Attributes:
        seconds: the predicted time to first token.
        fetch: blocks to take from another replica first.
        charges: seconds of work by replica, added to the backlogs when the option is taken.
        late: seconds by which tokens of running streams come later than promised, over all streams.
    """

    candidate: Candidate
    seconds: float
    fetch: Fetch | None = None
    charges: tuple[tuple[str, float], ...] = ()
    late: float = 0.0

    @property
    def cost(self) -> float:
        """The seconds to compare options by."""
        return self.seconds + self.late


def local(candidate: Candidate, num_tokens: int = 0, tpot: float | None = None) -> Option:
    """The prompt of ``num_tokens`` computed by the replica, with its cached blocks; ``tpot`` as in ``lateness``."""
    late = local_lateness(candidate, num_tokens, tpot)
    charges = ((candidate.report.replica_id, candidate.prefill),)
    return Option(candidate, candidate.seconds, None, charges, late)


def local_lateness(candidate: Candidate, num_tokens: int, tpot: float | None) -> float:
    """``Option.late`` of ``local``."""
    return lateness(candidate.report, candidate.prefill, num_tokens - candidate.hit_tokens, tpot)


def lateness(report: ReplicaReport, step: float, num_tokens: int, tpot: float | None) -> float:
    """Seconds by which the running streams of a replica get a token later than promised, over all streams.

    Args:
        step: seconds added to a step by a chunk of the prompt.
        num_tokens: of the prompt that are computed.
        tpot: seconds promised between two tokens of a stream; None promises nothing.
    """
    if tpot is None or num_tokens <= 0 or not report.num_running:
        return 0.0
    return report.num_running * max(0.0, report.decode_seconds + step - tpot)

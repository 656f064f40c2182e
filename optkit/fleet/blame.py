"""The requests that may have ended an engine, and the replicas on which such a request is on probation.

A death does not show which of the running requests was the cause. So every request begun by the dead engine is a
*suspect*, and each replica computes a single suspect at a time beside the other requests. A deterministic cause ends
the next engine before the answer has a token more than at the first death. Thus:

1. A suspect with more tokens than at the death, or at the end of the answer, is *cleared*.
2. Dead again with a suspect on board: the suspect is *guilty*, and refused for ``BLOCK_SECONDS``. The other requests
   are suspects, and are moved.
3. Dead without a suspect on board, for the second time in the life of a request: the request fails. So a cause with
   some tokens between the deaths ends two engines as well.
4. Dead while it computed the prompt of a request for another replica: the request is a suspect there.

The rules are those of ``optkit.serve.quarantine``, which guards an engine against repeated requests; here a single
ledger guards all replicas of an API process. Plain state without input, output or waiting.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from optkit.serve.quarantine import BLOCK_SECONDS, Remembered

logger = logging.getLogger("optkit.fleet")

REST_SECONDS = 0.25  # in which a replica that died or refused gets no request
MOST_DEATHS = 2  # without an explanation, of a request


class Verdict(enum.Enum):
    """The consequence of a death for a request."""

    MOVE = "go on with another replica"
    GUILTY = "the request is refused"
    UNLUCKY = "the request fails, as it was there at too many deaths without a known cause"


@dataclass(frozen=True)
class _Death:
    """A death of a replica: the time, and the request that was on probation."""

    time: float
    suspect: str | None


class Ledger:
    """Suspects, probations and blocks. ``name`` is a request's fingerprint, the same for a repeated request."""

    def __init__(self) -> None:
        self._suspects = Remembered[
            tuple[int, float]
        ]()  # fingerprint -> tokens at the death, end of the suspicion
        self._blocked = Remembered[float]()  # fingerprint -> end of the block
        self._probations: dict[str, tuple[str, bytes]] = {}  # replica -> request on probation
        self._deaths: dict[str, _Death] = {}  # replica -> the last death
        self._resting: dict[str, float] = {}  # replica -> end of the rest

    @property
    def is_empty(self) -> bool:
        """True while there is nobody to be careful with, so that no fingerprint is needed."""
        return not self._suspects and not self._blocked

    @property
    def probing(self) -> frozenset[str]:
        """The replicas with a suspect."""
        return frozenset(self._probations)

    def resting(self, now: float) -> frozenset[str]:
        """The replicas that have just died, or refused a request."""
        self._resting = {name: end for name, end in self._resting.items() if now < end}
        return frozenset(self._resting)

    def is_blocked(self, name: bytes, now: float) -> bool:
        return name in self._blocked and self._blocked[name] > now

    def forget(self, now: float) -> None:
        """Drop expired blocks and suspicions; the oldest come first."""
        while self._blocked and next(iter(self._blocked.values())) <= now:
            del self._blocked[next(iter(self._blocked))]
        while self._suspects and next(iter(self._suspects.values()))[1] <= now:
            del self._suspects[next(iter(self._suspects))]

    def is_suspect(self, name: bytes) -> bool:
        return name in self._suspects

    def begin(self, replica: str, request_id: str, name: bytes) -> None:
        """Put a suspect on probation on ``replica``, which has none."""
        if replica in self._probations:
            raise ValueError(f"{replica} computes a suspect already")
        self._probations[replica] = (request_id, name)

    def end(self, replica: str, request_id: str) -> None:
        """End the probation of a request, if the request is on probation there."""
        if self._is_on_probation(replica, request_id):
            del self._probations[replica]

    def passed(self, replica: str, request_id: str, num_tokens: int, *, is_over: bool = False) -> bool:
        """Clear a suspect with ``num_tokens`` tokens of its answer, if it is one and they are enough.

        Args:
            is_over: the answer has ended.
        """
        if not self._is_on_probation(replica, request_id):
            return False
        name = self._probations[replica][1]
        if not is_over and num_tokens <= self._suspects.get(name, (0, 0.0))[0]:
            return False
        self._suspects.pop(name, None)
        del self._probations[replica]
        return True

    def source_died(self, replica: str, request_id: str, name: bytes, now: float) -> None:
        """Suspect a request whose prompt was computed for ``replica`` by another replica that died.

        ``replica`` computes the prompt now, on probation: a death there is the second of the same request. Beside
        another suspect there is no probation, and the request is no suspect.
        """
        if replica in self._probations:
            return
        known, _ = self._suspects.get(name, (0, 0.0))
        self._suspects.remember(name, (known, now + BLOCK_SECONDS))
        self._probations[replica] = (request_id, name)

    def died(
        self,
        replica: str,
        request_id: str,
        name: bytes,
        *,
        since: float,
        num_tokens: int,
        num_deaths: int,
        now: float,
    ) -> Verdict:
        """Judge a request that ``replica`` had begun when the replica died.

        Each request of the replica calls this once.

        Args:
            since: the time at which the request was sent to the replica; a death before was another one.
            num_tokens: of the answer so far.
            num_deaths: unexplained deaths of the request before (``is_unexplained``).
        """
        death = self._deaths.get(replica)
        if death is None or death.time < since:
            suspect, _ = self._probations.get(replica, (None, b""))
            death = self._deaths[replica] = _Death(now, suspect)
        if death.suspect == request_id:
            self.block(name, now)
            return Verdict.GUILTY
        known, _ = self._suspects.get(name, (0, 0.0))
        self._suspects.remember(name, (max(num_tokens, known), now + BLOCK_SECONDS))
        return Verdict.UNLUCKY if num_deaths + self.is_unexplained(replica) >= MOST_DEATHS else Verdict.MOVE

    def rest(self, replica: str, now: float) -> None:
        """Send no request to ``replica`` for ``REST_SECONDS``."""
        self._resting[replica] = now + REST_SECONDS

    def is_unexplained(self, replica: str) -> bool:
        """True if no suspect was on board at the last death of ``replica``."""
        death = self._deaths.get(replica)
        return death is not None and death.suspect is None

    def block(self, name: bytes, now: float) -> None:
        """Refuse requests with the fingerprint ``name`` for ``BLOCK_SECONDS``."""
        self._suspects.pop(name, None)
        self._blocked.remember(name, now + BLOCK_SECONDS)
        logger.error("request %s ended two engines: refused for %.0f s", name.hex()[:12], BLOCK_SECONDS)

    def _is_on_probation(self, replica: str, request_id: str) -> bool:
        return self._probations.get(replica, (None, b""))[0] == request_id

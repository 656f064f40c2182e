"""A rolling update: replace the replicas of a version of the artifact by those of another, without a failed request.

    surge ──▶ self-test ──▶ canary ──▶ shift ──▶ done
      │           │            │         │
      └───────────┴────────────┴─────────┴──▶ roll back ──▶ failed

1. *Surge*: a replica of the new version, beside all old replicas, without requests of clients yet.
2. *Self-test*: known prompts have the known answers.
3. *Canary*: the new replica takes its share of the clients, and the paired bench compares it with an old replica
   (``optkit.fleet.examine``).
4. *Shift*: drain an old replica, start a new replica, again and again. Never fewer replicas serve than before, and
   never more than a single extra replica exists, draining replicas included (``max_surge``; 0: one fewer serves, for a
   machine without room). New requests go to a version in
   proportion to the serving replicas (``share``).
5. A failure at any place, or an alarm, turns the direction: old replicas come back, then the new replicas leave.

A request keeps a version from the first token to the last (``VersionSplit``, ``optkit.fleet.failover``). Indexes,
transfers of KV and failover never mix versions, because KV and answers differ between artifacts.

The state machine sees the fleet and names actions; ``roll`` performs the actions on a ``FleetControl``.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

logger = logging.getLogger("optkit.fleet")

TICK_SECONDS = 0.5


class Phase(enum.Enum):
    """The progress of an update."""

    SURGE = "surge"
    TEST = "self-test"
    CANARY = "canary"
    SHIFT = "shift"
    ROLL_BACK = "roll back"
    DONE = "done"
    FAILED = "failed"


class ReplicaView(NamedTuple):
    """A replica as the update sees it; a replica that still loads is not ready."""

    replica_id: str
    version: str
    is_ready: bool
    is_draining: bool = False
    num_requests: int = 0


class Verdict(NamedTuple):
    """The result of a self-test or of the bench."""

    passed: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{'held' if self.passed else 'FAILED'}: {self.reason or 'no fault found'}"


class Add(NamedTuple):
    """Start a replica of ``version``."""

    version: str

    def __str__(self) -> str:
        return f"start a replica of {self.version[:12]}"


class SelfTest(NamedTuple):
    """Send known prompts to the replica, and report a verdict."""

    replica_id: str

    def __str__(self) -> str:
        return f"test the new replica {self.replica_id}"


class Judge(NamedTuple):
    """Compare the new replica with an old one by the paired bench, and report a verdict."""

    canary: str
    baseline: str

    def __str__(self) -> str:
        return f"compare the new replica {self.canary} with {self.baseline}"


class Drain(NamedTuple):
    """Send no new requests to the replica."""

    replica_id: str

    def __str__(self) -> str:
        return f"drain {self.replica_id}"


class Remove(NamedTuple):
    """End the replica, which has no request."""

    replica_id: str

    def __str__(self) -> str:
        return f"remove {self.replica_id}"


Action = Add | SelfTest | Judge | Drain | Remove


@dataclass(frozen=True)
class Patience:
    """The longest time of each wait, in seconds."""

    start: float = 600.0
    test: float = 120.0
    judge: float = 1800.0


class Rollout:
    """The state machine of an update.

    Args:
        old, new: versions, the digests of two artifacts.
        num_replicas: that serve before and afterwards.
        max_surge: replicas beside them, 1 or 0.
        clock: seconds.

    Attributes:
        phase: of the update.
        reason: of a roll back.
    """

    def __init__(
        self,
        old: str,
        new: str,
        num_replicas: int,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_surge: int = 1,
    ) -> None:
        if old == new:
            raise ValueError("both versions are the same artifact")
        if num_replicas < 1:
            raise ValueError("an update needs a replica")
        if max_surge == 0 and num_replicas < 2:
            raise ValueError("the only replica can't be replaced without another beside it")
        self.old, self.new, self.num_replicas = old, new, num_replicas
        self._patience, self._clock, self._surge_size = patience or Patience(), clock, min(max_surge, 1)
        self.phase, self.reason = Phase.SURGE, ""
        self._since = clock()  # the last progress
        self._seen: frozenset[ReplicaView] = frozenset()
        self._is_asked = False  # for a verdict
        self._canary = ""

    @property
    def _most(self) -> int:
        """The most replicas of both versions."""
        return self.num_replicas + self._surge_size

    @property
    def _least(self) -> int:
        """The fewest replicas that serve."""
        return self._most - 1

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def share(self, replicas: Sequence[ReplicaView]) -> float:
        """The share of new requests for the new version."""
        old, new = (len(serving(replicas, version)) for version in (self.old, self.new))
        if self.phase in (Phase.CANARY, Phase.SHIFT, Phase.DONE):
            return new / (old + new) if new else 0.0
        return 0.0 if old or not new else 1.0

    def fail(self, reason: str) -> None:
        """Turn the direction: an alarm from outside, such as a rate of errors."""
        if self.phase not in (Phase.ROLL_BACK, Phase.DONE, Phase.FAILED):
            logger.error("the update to %s is rolled back: %s", self.new[:12], reason)
            self.reason = reason
            self._enter(Phase.ROLL_BACK)

    def report(self, verdict: Verdict) -> None:
        """Take the verdict that a ``SelfTest`` or a ``Judge`` asked for."""
        if self.phase not in (Phase.TEST, Phase.CANARY):
            return
        if not verdict.passed:
            self.fail(f"{self.phase.value}: {verdict.reason}")
        else:
            self._enter(Phase.CANARY if self.phase is Phase.TEST else Phase.SHIFT)

    def step(self, replicas: Sequence[ReplicaView]) -> list[Action]:
        """The actions to take now; ``replicas`` show the effects of all actions before."""
        match self.phase:
            case Phase.SURGE:
                return self._surge(replicas)
            case Phase.TEST | Phase.CANARY:
                return self._examine(replicas)
            case Phase.SHIFT:
                return self._replace(replicas, self.old, self.new, Phase.DONE)
            case Phase.ROLL_BACK:
                return self._replace(replicas, self.new, self.old, Phase.FAILED)
            case _:
                return []

    def _enter(self, phase: Phase) -> None:
        logger.info("update to %s: %s", self.new[:12], phase.value)
        self.phase, self._since, self._is_asked = phase, self._clock(), False

    def _surge(self, replicas: Sequence[ReplicaView]) -> list[Action]:
        ready = serving(replicas, self.new)
        if ready:
            self._canary = ready[0].replica_id
            self._enter(Phase.TEST)
            return self._examine(replicas)
        if self._is_late(self._patience.start):
            self.fail("the new version did not start")
        if of_version(replicas, self.new):
            return []
        if len(replicas) < self._most:
            return [Add(self.new)]
        gone = [Remove(view.replica_id) for view in replicas if view.is_draining and not view.num_requests]
        if any(view.is_draining for view in replicas):
            self._since = self._clock()  # answers end in their own time
            return list(gone)
        return [Drain(replicas[0].replica_id)]

    def _examine(self, replicas: Sequence[ReplicaView]) -> list[Action]:
        if self._canary not in {view.replica_id for view in serving(replicas, self.new)}:
            self.fail(f"{self.phase.value}: the new replica died")
            return []
        patience = self._patience.test if self.phase is Phase.TEST else self._patience.judge
        old = serving(replicas, self.old)
        if self._is_late(patience):
            self.fail(f"{self.phase.value}: it took too long")
        if self._is_asked or not old:
            return []
        self._is_asked = True
        is_test = self.phase is Phase.TEST
        return [SelfTest(self._canary) if is_test else Judge(self._canary, old[0].replica_id)]

    def _replace(self, replicas: Sequence[ReplicaView], old: str, new: str, end: Phase) -> list[Action]:
        """Replicas of ``new`` for those of ``old``, one at a time."""
        leaving, ready = of_version(replicas, old), serving(replicas, new)
        if not leaving and len(ready) >= self.num_replicas:
            self._enter(end)
            return []
        drained = [view for view in replicas if view.is_draining and not view.num_requests]
        actions: list[Action] = [Remove(view.replica_id) for view in drained]
        coming = [view for view in of_version(replicas, new) if not view.is_draining]
        staying = [view for view in leaving if not view.is_draining]
        idle = [view for view in staying if not view.is_ready]  # dead, or loading in vain
        if idle:
            actions.append(Drain(idle[0].replica_id))
        elif len(ready) + len(staying) > self._least and staying:
            actions.append(Drain(staying[0].replica_id))
        elif len(coming) < self.num_replicas and len(replicas) < self._most:
            actions.append(Add(new))
        if self.phase is Phase.SHIFT and self._is_stuck(replicas):
            self.fail("a replica of the new version did not start")
            return []
        return actions

    def _is_stuck(self, replicas: Sequence[ReplicaView]) -> bool:
        """True when nothing has changed for too long, though nobody waits for a request to end."""
        seen = frozenset(view._replace(num_requests=0) for view in replicas)
        if seen != self._seen or any(view.is_draining for view in replicas):
            self._seen, self._since = seen, self._clock()
        return self._is_late(self._patience.start)

    def _is_late(self, seconds: float) -> bool:
        return self._clock() - self._since > seconds


def of_version(replicas: Sequence[ReplicaView], version: str) -> list[ReplicaView]:
    return [view for view in replicas if view.version == version]


def serving(replicas: Sequence[ReplicaView], version: str) -> list[ReplicaView]:
    """The replicas of ``version`` that take requests."""
    return [view for view in of_version(replicas, version) if view.is_ready and not view.is_draining]


class VersionSplit:
    """Assigns new requests to versions by a share, evenly: of ten requests at 0.3 exactly three go to the new one."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        self.share = 0.0
        self._owed = 0.5

    def choose(self) -> str:
        """The version of the next request."""
        self._owed += self.share
        if self._owed < 1.0:
            return self.old
        self._owed -= 1.0
        return self.new


class FleetControl(Protocol):
    """The means of an update."""

    async def view(self) -> Sequence[ReplicaView]: ...

    async def add(self, version: str) -> None:
        """Begin to start a replica, which shows in ``view`` at once."""
        ...

    async def test(self, replica_id: str) -> Verdict: ...

    async def judge(self, canary: str, baseline: str) -> Verdict: ...

    async def drain(self, replica_id: str) -> None:
        """Send no new requests; return at once."""
        ...

    async def remove(self, replica_id: str) -> None: ...

    async def shift(self, share: float) -> None:
        """Send ``share`` of the new requests to the new version."""
        ...

    async def alarm(self) -> str:
        """The reason to roll back, beside the checks; empty: there is none."""
        ...


async def roll(
    rollout: Rollout,
    fleet: FleetControl,
    tick: float = TICK_SECONDS,
    tell: Callable[[str], None] = logger.info,
) -> Rollout:
    """Perform an update to its end; a failing check rolls it back (``Rollout.phase``, ``Rollout.reason``).

    Args:
        tell: hears each action and each verdict as a line.
    """
    verdicts: set[asyncio.Task[Verdict]] = set()
    share: float | None = None
    try:
        while True:
            views = await fleet.view()
            if alarm := await fleet.alarm():
                rollout.fail(alarm)
            actions = rollout.step(views)
            if (now := rollout.share(views)) != share:
                await fleet.shift(share := now)
            if rollout.is_over:
                return rollout
            for action in actions:
                tell(str(action))
                match action:
                    case Add(version):
                        await fleet.add(version)
                    case Drain(name):
                        await fleet.drain(name)
                    case Remove(name):
                        await fleet.remove(name)
                    case SelfTest(name):
                        verdicts.add(asyncio.create_task(fleet.test(name)))
                    case Judge(canary, baseline):
                        verdicts.add(asyncio.create_task(fleet.judge(canary, baseline)))
            if verdicts:
                done, verdicts = await asyncio.wait(verdicts, timeout=tick)
                for task in done:
                    verdict = _verdict(task)
                    tell(str(verdict))
                    rollout.report(verdict)
            else:
                await asyncio.sleep(tick)
    finally:
        for task in verdicts:
            task.cancel()


def _verdict(task: asyncio.Task[Verdict]) -> Verdict:
    error = task.exception()
    return task.result() if error is None else Verdict(False, f"{type(error).__name__}: {error}")

"""FleetEngine: several replicas as an engine (``optkit.serve.engine_api.AsyncEngine``).

A request goes through failover (``optkit.fleet.failover``) to the router's replica
(``optkit.fleet.router``). A task for each replica asks for a report every ``REPORT_SECONDS`` and tells the router, so
a silent replica delays no other. No decision waits for a replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from optkit.fleet.failover import Failover, Placed, Wanted
from optkit.fleet.handover import budget, heir
from optkit.fleet.member import Member, Members
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work
from optkit.fleet.router import Decision, NoReplica, Router, log_decision
from optkit.fleet.totals import Totals
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import Embedded, PinList, Profiled
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput

log = logging.getLogger("optkit.fleet")

REPORT_SECONDS = 0.25
SILENCE_SECONDS = 2.0  # without a report, after which a replica does not count as ready
NO_REPLICA = "no replica is ready"

T = TypeVar("T")


@dataclass(eq=False)
class _Known:
    """A replica of the fleet, with the last report.

    Attributes:
        is_heard: the last question was answered. A flag in place of the report's age, since a process that did not run
            for some seconds has old reports of good replicas.
    """

    member: Member
    watch: asyncio.Task[None] | None = None
    report: ReplicaReport | None = None
    info: EngineInfo | None = None
    is_heard: bool = False

    @property
    def is_ready(self) -> bool:
        """The replica takes requests."""
        report = self.report
        return (
            self.is_heard
            and report is not None
            and report.is_ready
            and not (report.is_draining or report.is_held)
        )


class _Chosen:
    """A replica chosen by ``decision``; the router learns the fate of the request."""

    def __init__(self, member: Member, decision: Decision, router: Router) -> None:
        self.replica_id = decision.replica_id
        self._member, self._decision, self._router = member, decision, router

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        is_answered = False
        # This turn of the loop sends the request.
        asyncio.get_running_loop().call_soon(log_decision, self._decision)
        try:
            stream = cast(AsyncGenerator[TokenOutput, None], self._member.generate(work))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if not is_answered and output.error is None:
                        is_answered = True
                        self._router.answered(self._decision, output.first)
                    yield output
        finally:
            if is_answered:
                self._router.ended(self._decision)
            else:
                self.give_up()

    def give_up(self) -> None:
        """Withdraw the request: the replica does not compute the prompt."""
        self._router.withdrawn(self._decision)

    async def report(self, since: Mark) -> ReplicaReport:
        return await self._member.report(since)

    async def drain(self) -> None:
        await self._member.drain()


class FleetEngine:
    """Replicas as an engine, alive from ``start`` to ``stop``. All calls belong to a single event loop.

    Args:
        members: the replicas, which come and go.
        router: chooses a replica for each request.
    """

    def __init__(self, members: Members, router: Router | None = None) -> None:
        self._members, self.router = members, router or Router()
        self.failover = Failover(self._place)
        self._known: dict[str, _Known] = {}
        self._totals = Totals()
        self._changed = asyncio.Event()  # set for a moment after each report
        self._following: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None

    async def start(self, timeout: float | None = None) -> EngineInfo:
        """Follow the replicas and wait for a ready replica; returns the facts of the replica.

        Raises:
            TimeoutError: no replica was ready within ``timeout`` seconds.
        """
        self._following = asyncio.create_task(self._follow())
        async with asyncio.timeout(timeout):
            while self._info is None:
                if self._following.done():
                    self._following.result()
                await self._changed.wait()
        return self._info

    async def stop(self) -> None:
        """Let go of all replicas."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        for name in list(self._known):
            await self._lose(name)

    # -- requests ---------------------------------------------------------------------------------------

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        return self.failover.generate(request)

    async def _place(self, wanted: Wanted) -> Placed | None:
        """The replica for a request (``optkit.fleet.failover.Choose``)."""
        prompt = self.router.prompt(wanted.request)
        try:
            decision = self.router.choose(prompt, exclude=wanted.avoid, version=wanted.version)
        except NoReplica:
            return None
        chosen = _Chosen(self._known[decision.replica_id].member, decision, self.router)
        work = Work(request=wanted.request, digests=decision.digests, fetch=decision.fetch)
        return Placed(chosen, decision.version, work, chosen.give_up)

    def _ready(self) -> list[_Known]:
        return [known for known in self._known.values() if known.is_ready]

    # -- the replicas -----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Watch each present replica, and no other."""
        async for members in self._members.changes():
            present = {member.replica_id: member for member in members}
            for name in self._known.keys() - present.keys():
                log.info("replica %s has left", name)
                await self._lose(name)
            for name in present.keys() - self._known.keys():
                log.info("replica %s has come", name)
                known = self._known[name] = _Known(present[name])
                known.watch = asyncio.create_task(self._watch(known))

    async def _lose(self, name: str) -> None:
        known = self._known[name]
        self.failover.source_gone(name)
        if known.watch is not None:
            known.watch.cancel()
            await asyncio.gather(known.watch, return_exceptions=True)
        del self._known[name]  # together with the router, whose choices are looked up here
        self.router.remove(name)
        self._totals.drop(name)
        await known.member.close()
        self._wake()

    async def _watch(self, known: _Known) -> None:
        """Ask for reports, until cancelled. The router forgets a replica without an answer."""
        while True:
            was_ready = known.is_ready
            try:
                await in_parts(self._ask(known), SILENCE_SECONDS)
            except TimeoutError:
                known.is_heard = False
            except ReplicaGone:
                known.is_heard = False
                self.failover.source_gone(known.member.replica_id)
                self.router.remove(known.member.replica_id)
            except Exception:
                known.is_heard = False
                log.exception("a report of the replica %s is of no use", known.member.replica_id)
            if known.is_ready and not was_ready:
                self.failover.wake()
            self._wake()
            await asyncio.sleep(REPORT_SECONDS)

    async def _ask(self, known: _Known) -> None:
        """Take a report of the replica, and the facts of each new engine."""
        name, last = known.member.replica_id, known.report
        since, asked = self.router.mark(name), self.router.clock()
        report = await known.member.report(since)
        is_new = known.info is None or last is None or last.num_restarts != report.num_restarts
        if not report.is_ready or (is_new and last is not None):
            self.failover.source_gone(name)
        if report.is_ready and is_new:
            known.info = await known.member.engine_info()
            self._info = self._info or known.info
        self.router.update(report, since, asked)
        self._totals.set(name, report.stats, report.num_restarts)
        known.report, known.is_heard = report, True
        if report.is_draining and last is not None and not last.is_draining:
            await self._hand_over(report)

    async def _hand_over(self, leaving: ReplicaReport) -> None:
        """Have another replica fetch the hot blocks of a draining replica."""
        target = heir(leaving, [known.report for known in self._ready() if known.report])
        if target is not None:
            log.info("replica %s hands its hot blocks to %s", leaving.replica_id, target.replica_id)
            await self._known[target.replica_id].member.take_over(leaving.peer_address, budget(target))

    def _wake(self) -> None:
        """Let ``start`` look again."""
        self._changed.set()
        self._changed.clear()

    # -- the engine -------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[ReplicaReport]:
        """The latest report of each replica."""
        return [known.report for known in self._known.values() if known.report]

    def member(self, replica_id: str) -> Member | None:
        """A replica that has reported; None where there is none of the name."""
        known = self._known.get(replica_id)
        return known.member if known is not None and known.report is not None else None

    @property
    def ready_ids(self) -> set[str]:
        """The ids of the replicas open for requests."""
        return {known.member.replica_id for known in self._ready()}

    @property
    def stats(self) -> EngineStats:
        """The sum over all replicas; counters include replicas of the past."""
        return self._totals.stats

    @property
    def info(self) -> EngineInfo | None:
        """The facts of a ready replica, or of the first ready replica ever."""
        ready = (known.info for known in self._ready() if known.info)
        return next(ready, self._info)

    @property
    def is_healthy(self) -> bool:
        return any(known.is_ready for known in self._known.values())

    @property
    def is_restarting(self) -> bool:
        """No replica is ready, and the cluster brings new replicas."""
        return not self.is_healthy and self._following is not None and not self._following.done()

    @property
    def num_restarts(self) -> int:
        return self._totals.num_restarts

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        """The vectors of the replica with the fewest requests; of a second replica where the first dies."""
        for known in sorted(self._ready(), key=_load)[:2]:
            try:
                return await known.member.embed(prompts, pooling)
            except ReplicaGone as gone:
                log.warning("%d texts lost the replica %s: %s", len(prompts), known.member.replica_id, gone)
        return Embedded("embed", error=NO_REPLICA)

    async def pins(self, drop: str | None = None) -> PinList:
        """The pins of all replicas; ``drop`` ends on each."""
        found = await self._all(lambda member: member.pins(drop))
        if not found:
            return PinList("pins", error=NO_REPLICA)
        return PinList("pins", tuple(pin for answer in found for pin in answer.pins))

    async def reset_prefix_cache(self) -> None:
        await self._all(lambda member: member.reset_prefix_cache())

    async def start_profile(self, steps: int) -> Profiled:
        """Begin a profile in each replica."""
        return _merged(await self._all(lambda member: member.start_profile(steps)))

    async def stop_profile(self, directory: str) -> Profiled:
        """End the profiles; each replica writes into a separate directory, on the replica's machine."""
        place = Path(directory)
        return _merged(await self._all(lambda member: member.stop_profile(str(place / member.replica_id))))

    async def _all(self, call: Callable[[Member], Awaitable[T]]) -> list[T]:
        """The answers of the ready replicas, without replicas lost meanwhile."""
        calls = [call(known.member) for known in self._ready()]
        found: list[T] = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, ReplicaGone):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found


async def in_parts(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of ``work``, or TimeoutError after two waits of half the time.

    A pause of the process ends the first wait; the second finds the answer that came meanwhile.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(2):
            if (await asyncio.wait([task], timeout=seconds / 2))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


def _load(known: _Known) -> int:
    """The requests of a replica."""
    return known.report.num_running + known.report.num_waiting if known.report else 0


def _merged(answers: Sequence[Profiled]) -> Profiled:
    """The profiles of several replicas as a single answer."""
    if not answers:
        return Profiled("profile", error=NO_REPLICA)
    good = [answer for answer in answers if answer.error is None]
    if not good:
        return answers[0]
    steps: dict[str, int] = {}
    for answer in good:
        for phase, count in answer.steps.items():
            steps[phase] = steps.get(phase, 0) + count
    return Profiled("profile", tuple(file for answer in good for file in answer.files), steps)

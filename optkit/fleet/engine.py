"""FleetEngine: several replicas as one engine (``optkit.serve.engine_api.AsyncEngine``).

A task for each replica asks for a report every ``REPORT_SECONDS``, so a silent replica delays no other. A request
goes to the replica that the router chooses among the ready ones. The choice reads the latest reports and waits for
nothing, except while no replica is ready.

``failover`` gets each request, with ``attempt``, which runs the request once: the place to repeat a broken answer on
another replica. The default repeats nothing and ends the answer as a single server does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

from optkit.fleet.choice import LeastQueue, Router
from optkit.fleet.member import Member, Members
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work
from optkit.fleet.totals import Totals
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE
from optkit.runtime.process.ipc import Embedded, PinList, Profiled
from optkit.runtime.types import EngineRequest, EngineStats, FinishReason, TokenOutput

log = logging.getLogger("optkit.fleet")

REPORT_SECONDS = 0.25
SILENCE_SECONDS = 2.0  # without a report, after which no request is sent to a replica
PATIENCE_SECONDS = 10.0  # of a request, for a ready replica
NO_REPLICA = "no replica is ready"

T = TypeVar("T")
Digests = Callable[[EngineRequest], tuple[bytes, ...]]


class Attempt(Protocol):
    """One run of a request on a replica that is not ``excluded``; raises ReplicaGone."""

    def __call__(
        self, request: EngineRequest, excluded: Collection[str] = ()
    ) -> AsyncIterator[TokenOutput]: ...


Failover = Callable[[EngineRequest, Attempt], AsyncIterator[TokenOutput]]


async def end_at_first_death(request: EngineRequest, attempt: Attempt) -> AsyncGenerator[TokenOutput, None]:
    """The outputs of one attempt; the death of a replica is the error of a dead engine."""
    try:
        async with aclosing(cast(AsyncGenerator[TokenOutput, None], attempt(request))) as outputs:
            async for output in outputs:
                yield output
    except ReplicaGone as gone:
        log.warning("request %s lost its replica %s: %s", request.request_id, gone.replica_id, gone)
        yield TokenOutput(
            request_id=request.request_id,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=ENGINE_DIED if gone.was_begun else ENGINE_GONE,
        )


def no_digests(request: EngineRequest) -> tuple[bytes, ...]:
    """No digests: the router sees lengths alone."""
    return ()


@dataclass(eq=False)
class _Known:
    """A replica of the fleet, with the last report and its time."""

    member: Member
    watch: asyncio.Task[None] | None = None
    report: ReplicaReport | None = None
    info: EngineInfo | None = None
    mark: Mark = Mark()
    heard: float = float("-inf")

    @property
    def is_ready(self) -> bool:
        """The replica takes requests."""
        report = self.report
        is_heard = time.monotonic() - self.heard < SILENCE_SECONDS
        return is_heard and report is not None and report.is_ready and not report.is_draining


class FleetEngine:
    """Replicas behind one engine. ``start`` and ``stop`` frame its life; use it from a single event loop.

    Args:
        members: the replicas, which come and go.
        router: chooses a replica for each request.
        failover: gives the outputs of a request, by one or several attempts.
        digests: of the full blocks of a request's prompt.
    """

    def __init__(
        self,
        members: Members,
        router: Router | None = None,
        failover: Failover = end_at_first_death,
        digests: Digests = no_digests,
    ) -> None:
        self._members, self._router = members, router or LeastQueue()
        self._failover, self._digests = failover, digests
        self._known: dict[str, _Known] = {}
        self._totals = Totals()
        self._changed = asyncio.Event()  # set for a moment after each report
        self._following: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None

    async def start(self, timeout: float | None = None) -> EngineInfo:
        """Follow the replicas and wait until one is ready; returns its facts.

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
        return self._failover(request, self.attempt)

    async def attempt(
        self, request: EngineRequest, excluded: Collection[str] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of one replica, chosen among the ready ones that are not ``excluded``; raises ReplicaGone."""
        digests = self._digests(request)
        candidates = await self._candidates(excluded)
        decision = self._router.choose(digests, len(request.prompt_ids), candidates)
        log.debug("request %s to replica %s: %s", request.request_id, decision.replica_id, decision.reason)
        known = self._known[decision.replica_id]
        work = Work(request=request, digests=digests, fetch=decision.fetch)
        try:
            stream = cast(AsyncGenerator[TokenOutput, None], known.member.generate(work))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        except ReplicaGone:
            known.heard = float("-inf")  # not chosen again before a new report
            raise

    async def _candidates(self, excluded: Collection[str]) -> list[ReplicaReport]:
        """The reports of ready replicas; waits for one, up to PATIENCE_SECONDS."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    ready = [known.report for known in self._ready() if known.report]
                    found = [report for report in ready if report.replica_id not in excluded]
                    if found:
                        return found
                    await self._changed.wait()
        except TimeoutError:
            raise ReplicaGone(NO_REPLICA, was_begun=False) from None

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
        known = self._known.pop(name)
        if known.watch is not None:
            known.watch.cancel()
            await asyncio.gather(known.watch, return_exceptions=True)
        self._router.forget(name)
        self._totals.drop(name)
        await known.member.close()
        self._wake()

    async def _watch(self, known: _Known) -> None:
        """Ask for reports, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._ask(known)
            except (ReplicaGone, TimeoutError):
                known.heard = float("-inf")
                self._totals.set(known.member.replica_id, EngineStats(), self._restarts_of(known))
            self._wake()
            await asyncio.sleep(REPORT_SECONDS)

    async def _ask(self, known: _Known) -> None:
        """Take a report of the replica, and the facts of each new engine."""
        last = known.report
        report = await known.member.report(known.mark)
        is_new = known.info is None or last is None or last.num_restarts != report.num_restarts
        if report.is_ready and is_new:
            known.info = await known.member.engine_info()
            self._info = self._info or known.info
        self._router.observe(report)
        self._totals.set(report.replica_id, report.stats, report.num_restarts)
        if report.changes is not None:
            known.mark = report.changes.mark
        known.report, known.heard = report, time.monotonic()

    def _restarts_of(self, known: _Known) -> int:
        return known.report.num_restarts if known.report else 0

    def _wake(self) -> None:
        """Let the waiting requests look again."""
        self._changed.set()
        self._changed.clear()

    # -- the engine -------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[ReplicaReport]:
        """The latest report of each replica."""
        return [known.report for known in self._known.values() if known.report]

    @property
    def num_ready(self) -> int:
        return len(self._ready())

    @property
    def stats(self) -> EngineStats:
        """The sum over all replicas; counters include replicas that have left."""
        return self._totals.stats

    @property
    def info(self) -> EngineInfo | None:
        """The facts of a ready replica, or of the first one that was."""
        ready = (known.info for known in self._ready() if known.info)
        return next(ready, self._info)

    @property
    def is_healthy(self) -> bool:
        return any(known.is_ready for known in self._known.values())

    @property
    def is_restarting(self) -> bool:
        """No replica is ready, and the cluster brings new ones."""
        return not self.is_healthy and self._following is not None and not self._following.done()

    @property
    def num_restarts(self) -> int:
        return self._totals.num_restarts

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        """The vectors of one replica, the one with the fewest requests; a second one where the first dies."""
        excluded: set[str] = set()
        while True:
            try:
                reports = await self._candidates(excluded)
                name = min(reports, key=lambda report: report.num_running + report.num_waiting).replica_id
                return await self._known[name].member.embed(prompts, pooling)
            except ReplicaGone as gone:
                if excluded or not gone.replica_id:
                    return Embedded("embed", error=str(gone))
                excluded.add(gone.replica_id)

    async def pins(self, drop: str | None = None) -> PinList:
        """The pins of all replicas; ``drop`` ends where it is."""
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
        """End the profiles; each replica writes into a directory of its own on its machine."""
        return _merged(
            await self._all(lambda member: member.stop_profile(str(Path(directory) / member.replica_id)))
        )

    async def _all(self, call: Callable[[Member], Awaitable[T]]) -> list[T]:
        """The answers of the ready replicas; a replica that goes meanwhile has none."""
        calls = [call(known.member) for known in self._ready()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: list[T] = []
        for answer in answers:
            if isinstance(answer, ReplicaGone):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found


def _merged(answers: Sequence[Profiled]) -> Profiled:
    """The profiles of several replicas as one answer."""
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

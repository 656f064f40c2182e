"""A replica in the same process: an engine under a supervisor, with reports and an end without lost requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, cast

from optkit.fleet.autoscale import Meter, ReplicaLoad
from optkit.fleet.handover import HAND_OVER_SECONDS
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work, replica_report
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED
from optkit.runtime.process.ipc import Embedded, PinList, Profiled, Reported
from optkit.runtime.report import EngineReport
from optkit.runtime.types import TokenOutput
from optkit.serve.engine_api import AsyncEngine

DEATHS = {ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED}  # ends of an answer by the end of the engine
DRAINING = "the replica takes no new requests"


class ReportingEngine(AsyncEngine, Protocol):
    """An engine with reports for a router, for example ``optkit.serve.supervisor.EngineSupervisor``."""

    async def report(self, since: Mark) -> Reported:
        """Load, predicted times, and the changes of the cached blocks after ``since``."""
        ...

    async def take_over(self, address: str, num_bytes: int) -> None:
        """Fetch the hot blocks of a leaving engine."""
        ...


class LocalReplica:
    """``engine`` as a replica (``optkit.fleet.member.Member``).

    Args:
        replica_id, version: of the reports.

    Attributes:
        is_held, prefill_weight: as in ``ReplicaReport``.
    """

    def __init__(self, engine: ReportingEngine, replica_id: str, version: str = "") -> None:
        self._engine, self.replica_id, self._version = engine, replica_id, version
        self._meter: Meter | None = None
        self._reported: ReplicaReport | None = None
        self._running = 0
        self._is_draining = False
        self.is_held, self.prefill_weight = False, 1.0
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of the engine; raises ReplicaGone for a death of the engine."""
        if self._is_draining:
            raise ReplicaGone(DRAINING, was_begun=False, replica_id=self.replica_id)
        self._running += 1
        self._idle.clear()
        try:
            stream = cast(AsyncGenerator[TokenOutput, None], self._engine.generate(work.sourced))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if output.error in DEATHS:
                        was_begun = output.error == ENGINE_DIED
                        raise ReplicaGone(output.error, was_begun=was_begun, replica_id=self.replica_id)
                    if output.first is not None and self._meter is not None:
                        self._meter.first_token(output.first, time.monotonic())
                    yield output
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def report(self, since: Mark) -> ReplicaReport:
        answer, info = await self._engine.report(since), self._engine.info
        self._reported = replica_report(
            answer.report or EngineReport(),
            self.replica_id,
            self._version,
            is_ready=answer.report is not None and self._engine.is_healthy,
            is_draining=self._is_draining,
            is_held=self.is_held,
            prefill_weight=self.prefill_weight,
            stats=self._engine.stats,
            num_restarts=self._engine.num_restarts,
            is_restarting=self._engine.is_restarting,
            kv_layout=info.kv_layout if info else "",
            peer_address=info.peer_address if info else "",
        )
        return self._reported

    def load(self) -> ReplicaLoad:
        """The work of the replica by the last report, for autoscaling; to be asked for about once a second."""
        info = self._engine.info
        if self._reported is None or info is None:
            return ReplicaLoad()
        if self._meter is None:
            self._meter = Meter(info.config.max_num_seqs)
        return self._meter.observe(self._reported, time.monotonic())

    async def drain(self) -> None:
        self._is_draining = True
        info = self._engine.info
        rest = HAND_OVER_SECONDS if info is not None and info.peer_address else 0.0
        await asyncio.gather(self._idle.wait(), asyncio.sleep(rest))

    async def engine_info(self) -> EngineInfo | None:
        return self._engine.info

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded:
        answer = await self._engine.embed(prompts, pooling)
        if answer.error in DEATHS:
            raise ReplicaGone(str(answer.error), was_begun=True, replica_id=self.replica_id)
        return answer

    async def pins(self, drop: str | None = None) -> PinList:
        return await self._engine.pins(drop)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def take_over(self, address: str, num_bytes: int) -> None:
        await self._engine.take_over(address, num_bytes)

    async def start_profile(self, steps: int) -> Profiled:
        return await self._engine.start_profile(steps)

    async def stop_profile(self, directory: str) -> Profiled:
        """The profile, written into ``directory``, made where missing."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        return await self._engine.stop_profile(directory)

    async def close(self) -> None:
        """Nothing: the engine belongs to the caller."""

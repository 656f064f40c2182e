"""Replicas in an event loop behind failover: mock replicas, or engine processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from optkit.fleet.failover import Failover, Migration, Placed, Wanted
from optkit.fleet.local import LocalReplica
from optkit.fleet.mock import MockModel
from optkit.fleet.mock_replica import MockReplica
from optkit.fleet.replica import Replica, Work
from optkit.fleet.rollout import ReplicaView, Verdict, VersionSplit
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import TokenOutput
from optkit.serve.supervisor import EngineSupervisor


class FleetReplica(Replica, Protocol):
    """A replica of a ``LocalFleet``."""

    is_draining: bool

    @property
    def version(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_streams(self) -> int:
        """The number of requests in service."""
        ...

    async def start(self) -> None:
        """Return when an engine is ready."""
        ...

    async def stop(self) -> None:
        """End the replica."""
        ...


R = TypeVar("R", bound=FleetReplica)


class LocalFleet(Generic[R]):
    """Replicas behind ``failover``. A request goes to the replica with the fewest requests.

    Attributes:
        migrations: of all requests, in order.
        split: assigns new requests to versions, during an update.
    """

    def __init__(self, patience_seconds: float = 30.0) -> None:
        self.replicas: dict[str, R] = {}
        self.migrations: list[Migration] = []
        self.split: VersionSplit | None = None
        self._versions: dict[str, str] = {}  # of requests without a token, during an update
        self._num_made = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self.failover = Failover(
            self.choose,
            patience_seconds=patience_seconds,
            clock=asyncio.get_running_loop().time,
            on_migration=self.migrations.append,
        )

    def new_name(self) -> str:
        self._num_made += 1
        return f"replica-{self._num_made}"

    async def enter(self, replica: R) -> R:
        """Take a replica into the fleet at once, and return when the engine is ready."""
        self.replicas[replica.replica_id] = replica
        await replica.start()
        self.failover.wake()
        return replica

    async def remove(self, replica_id: str) -> None:
        """End a replica for good."""
        await self.replicas.pop(replica_id).stop()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work`` beside the fleet."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def choose(self, wanted: Wanted) -> Placed | None:
        """The replica with the fewest requests (``optkit.fleet.failover.Choose``)."""
        version = wanted.version
        if version is None and self.split is not None:
            version = self._versions.setdefault(wanted.request.request_id, self.split.choose())
        found = self._open(wanted, version) or self._open(wanted, wanted.version)
        if not found:
            return None
        replica = min(found, key=lambda replica: replica.num_streams)
        return Placed(replica, replica.version, Work(request=wanted.request))

    def _open(self, wanted: Wanted, version: str | None) -> list[R]:
        """The replicas free for the request; a version of None is any."""
        return [
            replica
            for name, replica in self.replicas.items()
            if replica.is_ready
            and not replica.is_draining
            and name not in wanted.avoid
            and version in (None, replica.version)
        ]

    async def close(self) -> None:
        """End all replicas."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self.replicas):
            await self.remove(name)


class MockFleet(LocalFleet[MockReplica]):
    """A fleet of mock replicas, whose engines start again after a death.

    Args:
        restart_seconds: from a death to the start of the next engine, beside ``MockModel.load_seconds``; None: a dead
            replica stays dead.

    Attributes:
        num_deaths: of engines.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,
        restart_seconds: float | None = 2.0,
        patience_seconds: float = 30.0,
    ) -> None:
        super().__init__(patience_seconds)
        self._options, self._restart_seconds = options, restart_seconds
        self.num_deaths = 0

    async def add(self, model: MockModel, version: str = "v1") -> MockReplica:
        """A new replica, once the engine is ready; the replica is in ``replicas`` at once."""
        replica = MockReplica(self.new_name(), model, version, self._options)
        replica.on_death = self._died
        return await self.enter(replica)

    def _died(self, replica: MockReplica) -> None:
        self.num_deaths += 1
        if self._restart_seconds is not None:
            self.begin(self._restart(replica))

    async def _restart(self, replica: MockReplica) -> None:
        await asyncio.sleep(self._restart_seconds or 0.0)
        if self.replicas.get(replica.replica_id) is replica:
            await replica.start()
            self.failover.wake()


class ProcessReplica(LocalReplica):
    """An engine process under a supervisor, which starts the next process after a death."""

    def __init__(
        self, replica_id: str, artifact_dir: str, version: str, options: EngineOptions, factory: str
    ) -> None:
        self.supervisor = EngineSupervisor(lambda: EngineClient(artifact_dir, options, factory=factory))
        super().__init__(self.supervisor, replica_id, version)
        self.version, self.is_draining, self.num_streams = version, False, 0

    @property
    def is_ready(self) -> bool:
        return self.supervisor.is_healthy

    async def start(self) -> None:
        await self.supervisor.start()

    async def stop(self) -> None:
        await self.supervisor.stop()

    def kill(self) -> None:
        """Kill the engine process from outside."""
        if self.supervisor.pid is not None:
            os.kill(self.supervisor.pid, signal.SIGKILL)

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        self.num_streams += 1
        try:
            outputs: AsyncIterator[TokenOutput] = super().generate(work)
            async for output in outputs:
                yield output
        finally:
            self.num_streams -= 1

    async def drain(self) -> None:
        self.is_draining = True
        await super().drain()


class ProcessFleet(LocalFleet[ProcessReplica]):
    """A fleet of engine processes on the local machine.

    Args:
        artifacts: first argument of the factory, by version.
        factory: of the engines.
    """

    def __init__(
        self, artifacts: Mapping[str, str], factory: str, options: EngineOptions | None = None
    ) -> None:
        super().__init__()
        self._artifacts, self._factory, self._options = artifacts, factory, options or EngineOptions()

    async def add(self, version: str) -> ProcessReplica:
        """A new replica, once the engine is ready; the replica is in ``replicas`` at once."""
        name, directory = self.new_name(), self._artifacts[version]
        replica = await self.enter(ProcessReplica(name, directory, version, self._options, self._factory))
        self.begin(self._replace(replica))
        return replica

    async def _replace(self, replica: ProcessReplica) -> None:
        """Start another replica when the supervisor has given up, as a cluster does."""
        await replica.supervisor.wait_gave_up()
        if replica.supervisor.gave_up and replica.replica_id in self.replicas:
            await self.remove(replica.replica_id)
            await self.add(replica.version)


class LocalControl:
    """The means of an update of a fleet (``optkit.fleet.rollout.FleetControl``).

    Args:
        add: starts a replica of a version.
        test, judge: give the verdicts, from ids of replicas.

    Attributes:
        shares: of new requests for the new version, in order.
        alarms: the reason of an alarm; empty: none.
    """

    def __init__(
        self,
        fleet: LocalFleet[Any],
        split: VersionSplit,
        add: Callable[[str], Coroutine[Any, Any, object]],
        test: Callable[[str], Awaitable[Verdict]],
        judge: Callable[[str, str], Awaitable[Verdict]],
    ) -> None:
        self._fleet, self._add, self._test, self._judge = fleet, add, test, judge
        self._split = fleet.split = split
        self.shares: list[float] = []
        self.alarms = ""

    async def view(self) -> Sequence[ReplicaView]:
        return [
            ReplicaView(name, replica.version, replica.is_ready, replica.is_draining, replica.num_streams)
            for name, replica in self._fleet.replicas.items()
        ]

    async def add(self, version: str) -> None:
        self._fleet.begin(self._add(version))
        await asyncio.sleep(0)  # it shows at once

    async def test(self, replica_id: str) -> Verdict:
        return await self._test(replica_id)

    async def judge(self, canary: str, baseline: str) -> Verdict:
        return await self._judge(canary, baseline)

    async def drain(self, replica_id: str) -> None:
        self._fleet.begin(self._fleet.replicas[replica_id].drain())
        await asyncio.sleep(0)

    async def remove(self, replica_id: str) -> None:
        await self._fleet.remove(replica_id)

    async def shift(self, share: float) -> None:
        self.shares.append(share)
        self._split.share = share

    async def alarm(self) -> str:
        return self.alarms

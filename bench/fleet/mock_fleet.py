"""A fleet of mock replicas in one event loop, which start again after a death, behind failover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from optkit.fleet.failover import Failover, Migration, Placed, Wanted
from optkit.fleet.mock import MockModel
from optkit.fleet.mock_replica import MockReplica
from optkit.fleet.replica import Work
from optkit.fleet.rollout import ReplicaView, Verdict, VersionSplit
from optkit.recipe.engine_options import EngineOptions


class MockFleet:
    """Replicas, and ``failover`` over them. A request goes to the replica with the fewest requests.

    Args:
        restart_seconds: from a death to the start of the next engine, beside ``MockModel.load_seconds``; None: a dead
            replica stays dead.

    Attributes:
        migrations: of all requests, in order.
        split: assigns new requests to versions, during an update.
        num_deaths: of engines.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,
        restart_seconds: float | None = 2.0,
        patience_seconds: float = 30.0,
    ) -> None:
        self._options, self._restart_seconds = options, restart_seconds
        self.replicas: dict[str, MockReplica] = {}
        self.migrations: list[Migration] = []
        self.split: VersionSplit | None = None
        self._versions: dict[str, str] = {}  # of requests without a token, during an update
        self.num_deaths = self._num_made = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self.failover = Failover(
            self.choose,
            patience_seconds=patience_seconds,
            clock=asyncio.get_running_loop().time,
            on_migration=self.migrations.append,
        )

    async def add(self, model: MockModel, version: str = "v1") -> MockReplica:
        """A new replica, when its engine is ready; it is one of ``replicas`` at once."""
        self._num_made += 1
        replica = MockReplica(f"replica-{self._num_made}", model, version, self._options)
        replica.on_death = self._died
        self.replicas[replica.replica_id] = replica
        await replica.start()
        self.failover.wake()
        return replica

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work`` beside the fleet."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remove(self, replica_id: str) -> None:
        """End a replica for good."""
        replica = self.replicas.pop(replica_id)
        replica.on_death = None
        replica.kill()

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

    def _open(self, wanted: Wanted, version: str | None) -> list[MockReplica]:
        """The replicas that may take the request; a version of None is any."""
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
        for name in list(self.replicas):
            self.remove(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _died(self, replica: MockReplica) -> None:
        self.num_deaths += 1
        if self._restart_seconds is not None:
            self.begin(self._restart(replica))

    async def _restart(self, replica: MockReplica) -> None:
        await asyncio.sleep(self._restart_seconds or 0.0)
        if self.replicas.get(replica.replica_id) is replica:
            await replica.start()
            self.failover.wake()


class MockControl:
    """The means of an update of a ``MockFleet`` (``optkit.fleet.rollout.FleetControl``).

    Args:
        models: by version.
        test, judge: give the verdicts, from ids of replicas.

    Attributes:
        shares: of new requests for the new version, as they were set.
    """

    def __init__(
        self,
        fleet: MockFleet,
        models: Mapping[str, MockModel],
        test: Callable[[str], Awaitable[Verdict]],
        judge: Callable[[str, str], Awaitable[Verdict]],
    ) -> None:
        self._fleet, self._models, self._test, self._judge = fleet, models, test, judge
        old, new = models
        fleet.split = VersionSplit(old, new)
        self.shares: list[float] = []

    async def view(self) -> Sequence[ReplicaView]:
        return [
            ReplicaView(name, replica.version, replica.is_ready, replica.is_draining, replica.num_streams)
            for name, replica in self._fleet.replicas.items()
        ]

    async def add(self, version: str) -> None:
        self._fleet.begin(self._fleet.add(self._models[version], version))
        await asyncio.sleep(0)  # it shows at once

    async def test(self, replica_id: str) -> Verdict:
        return await self._test(replica_id)

    async def judge(self, canary: str, baseline: str) -> Verdict:
        return await self._judge(canary, baseline)

    async def drain(self, replica_id: str) -> None:
        self._fleet.begin(self._fleet.replicas[replica_id].drain())
        await asyncio.sleep(0)

    async def remove(self, replica_id: str) -> None:
        self._fleet.remove(replica_id)

    async def shift(self, share: float) -> None:
        self.shares.append(share)
        if self._fleet.split is not None:
            self._fleet.split.share = share

"""A fleet of mock replicas in one event loop, which start again after a death, behind failover."""

from __future__ import annotations

import asyncio

from optkit.fleet.failover import Failover, Migration, Placed, Wanted
from optkit.fleet.mock import MockModel
from optkit.fleet.mock_replica import MockReplica
from optkit.fleet.replica import Work
from optkit.recipe.engine_options import EngineOptions


class MockFleet:
    """Replicas, and ``failover`` over them. A request goes to the replica with the fewest requests.

    Args:
        restart_seconds: from a death to the start of the next engine, beside ``MockModel.load_seconds``; None: a dead
            replica stays dead.

    Attributes:
        migrations: of all requests, in order.
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
        self.num_deaths = self._num_made = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.failover = Failover(
            self.choose,
            patience_seconds=patience_seconds,
            clock=asyncio.get_running_loop().time,
            on_migration=self.migrations.append,
        )

    async def add(self, model: MockModel, version: str = "v1") -> MockReplica:
        """A new replica, when its engine is ready."""
        self._num_made += 1
        replica = MockReplica(f"replica-{self._num_made}", model, version, self._options)
        replica.on_death = self._died
        self.replicas[replica.replica_id] = replica
        await replica.start()
        self.failover.wake()
        return replica

    def remove(self, replica_id: str) -> None:
        """End a replica for good."""
        replica = self.replicas.pop(replica_id)
        replica.on_death = None
        replica.kill()

    def allows(self, replica: MockReplica, wanted: Wanted) -> bool:
        """True where ``replica`` may take the request."""
        is_open = replica.is_ready and not replica.is_draining and replica.replica_id not in wanted.avoid
        return is_open and wanted.version in (None, replica.version)

    async def choose(self, wanted: Wanted) -> Placed | None:
        """The replica with the fewest requests (``optkit.fleet.failover.Choose``)."""
        found = [replica for replica in self.replicas.values() if self.allows(replica, wanted)]
        if not found:
            return None
        replica = min(found, key=lambda replica: replica.num_streams)
        return Placed(replica, replica.version, Work(request=wanted.request))

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
            task = asyncio.get_running_loop().create_task(self._restart(replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _restart(self, replica: MockReplica) -> None:
        await asyncio.sleep(self._restart_seconds or 0.0)
        if self.replicas.get(replica.replica_id) is replica:
            await replica.start()
            self.failover.wake()

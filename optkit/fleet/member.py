"""A replica for the engine of a fleet: generation, and all further calls of a single engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from optkit.fleet.replica import Replica
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import Embedded, PinList, Profiled


class Member(Replica, Protocol):
    """A replica with the further calls of an engine. All raise ReplicaGone."""

    async def engine_info(self) -> EngineInfo | None:
        """The facts of the loaded engine; None while there is none."""
        ...

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Embedded: ...

    async def pins(self, drop: str | None = None) -> PinList: ...

    async def reset_prefix_cache(self) -> None: ...

    async def take_over(self, address: str, num_bytes: int) -> None:
        """Fetch the hot blocks of the leaving replica at ``address``, up to ``num_bytes`` of KV."""
        ...

    async def start_profile(self, steps: int) -> Profiled: ...

    async def stop_profile(self, directory: str) -> Profiled: ...

    async def close(self) -> None:
        """Let go of the replica, which goes on; open streams end with ReplicaGone."""
        ...


class Members(Protocol):
    """The replicas of a fleet, which come and go."""

    def changes(self) -> AsyncIterator[Sequence[Member]]:
        """All present replicas, now and after each change."""
        ...

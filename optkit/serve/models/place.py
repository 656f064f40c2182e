"""A model of the pool with state: requests, waits, loads."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Model(Protocol):
    """A model in a pool.

    Attributes:
        name: for the log.
        num_bytes: memory from the beginning of a load to the end of the unload; a load may find another number.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    async def load(self) -> None:
        """Load the model; a failed or cancelled load leaves nothing behind."""
        ...

    async def unload(self) -> None: ...

    async def wait_lost(self) -> None:
        """Return when the loaded model can't answer any more requests."""
        ...


class State(enum.StrEnum):
    """States of a model, in the words of llama.cpp's router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


M = TypeVar("M", bound=Model)


@dataclass(eq=False)
class Place(Generic[M]):
    """The state of a model in the pool."""

    model: M
    num_bytes: int
    state: State = State.UNLOADED
    users: int = 0  # requests with the model
    turns: list[asyncio.Future[None]] = field(default_factory=list)  # of requests that wait for the model
    queued: float = 0.0  # when the model came to the queue
    began: float = 0.0  # the last request
    ended: float = 0.0
    is_lost: bool = False
    is_held: bool = False  # new requests wait, so that the model becomes idle and makes room
    retry_at: float = 0.0
    timer: asyncio.TimerHandle | None = None  # to unload the idle model
    watch: asyncio.Task[None] | None = None
    work: asyncio.Task[None] | None = None  # a load or an unload

    @property
    def takes_requests(self) -> bool:
        return self.state is State.LOADED and not self.is_held and not self.is_lost

    @property
    def is_idle(self) -> bool:
        return self.state is State.LOADED and not self.users


def total(places: Iterable[Place[M]]) -> int:
    return sum(place.num_bytes for place in places)


def enough(places: Sequence[Place[M]], num_bytes: int) -> list[Place[M]]:
    """The first of ``places`` with ``num_bytes`` together, without superfluous places."""
    chosen: list[Place[M]] = []
    for place in places:
        if total(chosen) < num_bytes:
            chosen.append(place)
    for place in reversed(chosen[:-1]):
        if total(chosen) - place.num_bytes >= num_bytes:
            chosen.remove(place)
    return chosen

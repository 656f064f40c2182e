"""The models of a server with shared memory: loaded for the first request, unloaded when idle or for other models.

Rules:

* The memory of all models in the states loading, loaded and unloading stays within the budget.
* A model with requests is never unloaded.
* The first request loads the model; requests during the load wait for the same load.
* A model without room waits in a queue. The idle models with the oldest use make room, if enough.
* If not, the model waits until other models are idle. Meanwhile models behind in the queue may take free memory.
  After ``patience`` seconds the free memory is kept, and new requests of the busy models with the oldest use wait in
  the queue, too: so busy models become idle, and no model waits forever.
* A request waits at most ``load_timeout`` seconds, then the answer is an error.
* A model with a failed load is refused for ``retry_seconds``, then the next request tries again.

Everything runs on a single event loop, and every time is the loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

from optkit.errors import UserError
from optkit.runtime.process.client import EngineDied
from optkit.serve.http.admission import at_capacity
from optkit.serve.http.errors import ApiError
from optkit.serve.models.place import M, Place, State, enough, total
from optkit.serve.shutdown import shutting_down

log = logging.getLogger("optkit.serve")

RETRY_AFTER = 5  # seconds, told to clients that waited in vain
IDLE, MEMORY, LOST = "idle", "memory", "lost"  # reasons of an unload


class Observer(Protocol):
    """Receiver of the events of a pool."""

    def loaded(self, name: str, seconds: float) -> None: ...

    def failed(self, name: str) -> None: ...

    def unloaded(self, name: str, reason: str) -> None: ...

    def waited(self, name: str, seconds: float) -> None:
        """A request waited for the model, and has the model now."""
        ...


@dataclass(frozen=True)
class PoolLimits:
    """Limits of a pool.

    Attributes:
        budget_bytes: memory of all models together.
        idle_timeout: seconds without requests after which a model is unloaded; 0: never.
        load_timeout: longest wait of a request for the model, in seconds.
        max_waiting: bound on the requests waiting for a model; further requests get 429.
        patience: wait of a model for memory, in seconds, before requests of busy models are held back.
        retry_seconds: time between a failed load and the next try.
    """

    budget_bytes: int
    idle_timeout: float = 300.0
    load_timeout: float = 120.0
    max_waiting: int = 256
    patience: float = 10.0
    retry_seconds: float = 5.0


class ModelPool(Generic[M]):
    """Loads and unloads ``models``, by the rules of the module. Use it from a single event loop.

    Args:
        observer: gets the events, for metrics.
    """

    def __init__(self, models: Sequence[M], limits: PoolLimits, observer: Observer) -> None:
        self.limits, self._observer = limits, observer
        self._places = {model.name: Place(model, self._need(model)) for model in models}
        self._queue: list[Place[M]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def models(self) -> list[M]:
        return [place.model for place in self._places.values()]

    @property
    def reserved_bytes(self) -> int:
        """Memory of all models but the unloaded."""
        return total(place for place in self._places.values() if place.state is not State.UNLOADED)

    def state(self, name: str) -> State:
        return self._places[name].state

    def is_ready(self, name: str) -> bool:
        """A request gets the model without waiting."""
        return self._places[name].takes_requests and not self._is_closed

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[M]:
        """The loaded model, kept loaded until the body ends.

        Raises:
            ApiError: 429 too many requests wait; 503 no memory in time, a slow or failed load, or the server ends.
        """
        place = self._places[name]
        await self._enter(place)
        try:
            yield place.model
        finally:
            self._leave(place)

    def refuse(self) -> None:
        """End all waits, and begin no further load: the server ends."""
        self._is_closed = True
        for place in self._places.values():
            self._fail(place, shutting_down)
        self._queue.clear()

    async def close(self) -> None:
        """Unload all models, used or not."""
        self.refuse()
        if self._timer:
            self._timer.cancel()
        places = self._places.values()
        for place in places:
            if place.work and place.state is State.LOADING:
                place.work.cancel()
            elif place.state is State.LOADED:
                self._unload(place, "")
        await asyncio.gather(*(place.work for place in places if place.work), return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------------------

    async def _enter(self, place: Place[M]) -> None:
        """Count a request of the model, after the load."""
        if self._is_closed:
            raise shutting_down()
        if place.takes_requests:
            self._begin(place)
            return
        start = asyncio.get_running_loop().time()
        if place.state is State.UNLOADED and start < place.retry_at:
            raise _load_failed(place.model.name, place.retry_at - start)
        if len(place.turns) >= self.limits.max_waiting:
            raise at_capacity()
        turn = asyncio.get_running_loop().create_future()
        place.turns.append(turn)
        if place.state is not State.LOADING and place not in self._queue:
            self._queue.append(place)
            place.queued = start
        self._advance()
        try:
            async with asyncio.timeout(self.limits.load_timeout):
                await self._wait(place, turn)
        except TimeoutError:
            raise _late(place.state) from None
        self._observer.waited(place.model.name, asyncio.get_running_loop().time() - start)

    async def _wait(self, place: Place[M], turn: asyncio.Future[None]) -> None:
        """Wait for ``turn``; a cancelled wait leaves nothing behind."""
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(place)  # granted at the same moment
            raise
        finally:
            if turn in place.turns:
                place.turns.remove(turn)
                self._advance()

    def _begin(self, place: Place[M]) -> None:
        place.users += 1
        place.began = asyncio.get_running_loop().time()
        if place.timer:
            place.timer.cancel()
            place.timer = None

    def _leave(self, place: Place[M]) -> None:
        place.users -= 1
        if not place.users:
            self._rest(place)
        self._advance()

    def _rest(self, place: Place[M]) -> None:
        """Note the end of the last request, and when the idle model is to be unloaded."""
        loop = asyncio.get_running_loop()
        place.ended = loop.time()
        if self.limits.idle_timeout and place.state is State.LOADED:
            place.timer = loop.call_later(self.limits.idle_timeout, self._unload, place, IDLE)

    def _grant(self, place: Place[M]) -> None:
        """Give the model to all waiting requests."""
        for turn in place.turns:
            if not turn.done():
                self._begin(place)
                turn.set_result(None)
        place.turns.clear()

    def _fail(self, place: Place[M], error: Callable[[], ApiError]) -> None:
        """End all waits for the model with an error."""
        for turn in place.turns:
            if not turn.done():
                turn.set_exception(error())
        place.turns.clear()

    # -- decisions ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Decide again, after any event: who gets the model, what is loaded, what is unloaded."""
        if self._is_closed:
            return
        places = self._places.values()
        self._queue = [place for place in self._queue if place.turns]
        for place in places:
            place.is_held = False
            if place.is_lost and place.is_idle:
                self._unload(place, LOST)
        while self._queue and self._queue[0].takes_requests:  # held back for a model that waits no more
            self._grant(self._queue.pop(0))
        self._load_what_fits()
        if self._queue:
            self._make_room(self._queue[0])
        self._shrink()
        for place in [
            place for place in self._queue if place.takes_requests
        ]:  # held back before, and no longer
            self._queue.remove(place)
            self._grant(place)

    def _load_what_fits(self) -> None:
        """Load models of the queue into free memory: the first, and while the first has patience any other."""
        for place in list(self._queue):
            free = self.limits.budget_bytes - self.reserved_bytes
            if place.state is State.UNLOADED and place.num_bytes <= free:
                self._queue.remove(place)
                self._load(place)
            elif self._patience_left(place) <= 0:
                return

    def _patience_left(self, place: Place[M]) -> float:
        return place.queued + self.limits.patience - asyncio.get_running_loop().time()

    def _make_room(self, first: Place[M]) -> None:
        """Unload idle models for ``first``; if not enough in time, hold back requests of busy models."""
        coming = total(place for place in self._places.values() if place.state is State.UNLOADING)
        short = first.num_bytes - (self.limits.budget_bytes - self.reserved_bytes) - coming
        if first.state is not State.UNLOADED or short <= 0:
            return
        loaded = [place for place in self._places.values() if place.state is State.LOADED]
        idle = sorted((place for place in loaded if place.is_idle), key=lambda place: place.ended)
        if total(idle) >= short:
            for place in enough(idle, short):
                self._unload(place, MEMORY)
        elif (left := self._patience_left(first)) > 0:
            self._look_again(left)
        else:
            busy = sorted((place for place in loaded if place.users), key=lambda place: place.began)
            for place in enough(busy, short - total(idle)):
                place.is_held = True

    def _look_again(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds + 0.001, self._advance)

    def _shrink(self) -> None:
        """Unload idle models while the models need more than the budget: a load may correct its need."""
        coming = total(place for place in self._places.values() if place.state is State.UNLOADING)
        excess = self.reserved_bytes - coming - self.limits.budget_bytes
        if excess > 0:
            idle = sorted((p for p in self._places.values() if p.is_idle), key=lambda place: place.ended)
            for place in enough(idle, excess):
                self._unload(place, MEMORY)

    # -- loads and unloads -------------------------------------------------------------------------------

    def _need(self, model: M) -> int:
        """The memory to reserve, in bytes: a model beyond the budget is loaded alone."""
        return min(model.num_bytes, self.limits.budget_bytes)

    def _load(self, place: Place[M]) -> None:
        place.state = State.LOADING
        place.work = asyncio.create_task(self._run_load(place))

    async def _run_load(self, place: Place[M]) -> None:
        loop = asyncio.get_running_loop()
        start, name = loop.time(), place.model.name
        try:
            await place.model.load()
        except asyncio.CancelledError:
            place.state = State.UNLOADED
            raise
        except Exception as error:
            place.state, place.retry_at = State.UNLOADED, loop.time() + self.limits.retry_seconds
            self._observer.failed(name)
            trace = None if isinstance(error, (UserError, EngineDied)) else error
            log.error("the model %s could not be loaded: %s", name, error, exc_info=trace)
            self._fail(place, lambda: _load_failed(name, self.limits.retry_seconds))
            self._advance()
            return
        place.state, place.num_bytes = State.LOADED, self._need(place.model)
        self._observer.loaded(name, loop.time() - start)
        place.watch = asyncio.create_task(self._watch(place))
        self._grant(place)
        if not place.users:
            self._rest(place)
        self._advance()

    async def _watch(self, place: Place[M]) -> None:
        """Have a lost model unloaded after the end of the requests, which get errors."""
        await place.model.wait_lost()
        if place.state is State.LOADED and not self._is_closed:
            log.error("the model %s is lost; the next request loads it again", place.model.name)
            place.is_lost = True
            self._advance()

    def _unload(self, place: Place[M], reason: str) -> None:
        place.state = State.UNLOADING
        if place.timer:
            place.timer.cancel()
            place.timer = None
        place.work = asyncio.create_task(self._run_unload(place, reason))

    async def _run_unload(self, place: Place[M], reason: str) -> None:
        if place.watch:
            place.watch.cancel()
            await asyncio.gather(place.watch, return_exceptions=True)
        try:
            await place.model.unload()
        except Exception:
            log.exception("the model %s was not unloaded cleanly", place.model.name)
        place.state, place.is_lost = State.UNLOADED, False
        if reason:
            self._observer.unloaded(place.model.name, reason)
        self._advance()


def _late(state: State) -> ApiError:
    if state is State.LOADING:
        message, code = "the model is still being loaded; try again later", "model_loading"
    else:
        message, code = (
            "no memory for this model: the loaded ones are busy; try again later",
            "model_no_memory",
        )
    return ApiError(message, code=code, status=503, retry_after=RETRY_AFTER)


def _load_failed(name: str, seconds: float) -> ApiError:
    message = f"the model {name} could not be loaded; the log of the server has the reason"
    return ApiError(message, code="model_load_failed", status=503, retry_after=max(1, round(seconds)))

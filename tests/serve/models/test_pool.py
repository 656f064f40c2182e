"""The pool of models: examples of each rule, and random histories against the rules that always hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from optkit.errors import UserError
from optkit.serve.http.errors import ApiError
from optkit.serve.models.place import State
from optkit.serve.models.pool import IDLE, LOST, MEMORY, ModelPool, PoolLimits
from tests.support.virtual_loop import VirtualLoop

BUDGET, LOAD_SECONDS, STOP_SECONDS = 10, 2.0, 1.0
LIMITS = PoolLimits(BUDGET, idle_timeout=300, load_timeout=60, max_waiting=3, patience=10, retry_seconds=5)


class FakeModel:
    """Holds ``num_bytes`` from the beginning of a load to the end of the unload."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.held, self.loads, self.unloads, self.fails = 0, 0, 0, 0
        self.is_loaded = False
        self._lost: asyncio.Event | None = None

    async def load(self) -> None:
        assert not self.held
        self.loads += 1
        self.held = self.num_bytes
        try:
            await asyncio.sleep(LOAD_SECONDS)
            if self.fails:
                self.fails -= 1
                raise UserError("it is broken")
        except BaseException:
            self.held = 0
            raise
        self._lost, self.is_loaded = asyncio.Event(), True

    async def unload(self) -> None:
        self.unloads += 1
        self.is_loaded = False
        await asyncio.sleep(STOP_SECONDS)
        self.held = 0

    async def wait_lost(self) -> None:
        assert self._lost
        await self._lost.wait()

    def lose(self) -> None:
        if self._lost:
            self._lost.set()


class Events:
    """The events of a pool, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def loaded(self, name: str, seconds: float) -> None:
        self.all.append(("loaded", name, seconds))

    def failed(self, name: str) -> None:
        self.all.append(("failed", name))

    def unloaded(self, name: str, reason: str) -> None:
        self.all.append(("unloaded", name, reason))

    def waited(self, name: str, seconds: float) -> None:
        self.all.append(("waited", name, seconds))


class Asked:
    """A request: waits for the model, has it until ``finish``."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.error, self.model = name, None, None
        self._end = asyncio.Event()
        self._world = world
        self.task = world.loop.create_task(self._run())
        world.loop.settle()

    async def _run(self) -> None:
        try:
            async with self._world.pool.use(self.name) as self.model:
                await self._end.wait()
        except ApiError as error:
            self.error = error

    @property
    def has_model(self) -> bool:
        return self.model is not None and not self.task.done()

    def finish(self) -> None:
        self._end.set()
        self._world.loop.settle()

    def cancel(self) -> None:
        self.task.cancel()
        self._world.loop.settle()


class World:
    """A pool on a loop with its own time."""

    def __init__(self, limits: PoolLimits = LIMITS, **sizes: int) -> None:
        self.loop = VirtualLoop()
        self.models = {name: FakeModel(name, size) for name, size in sizes.items()}
        self.events = Events()
        self.pool = ModelPool(list(self.models.values()), limits, self.events)

    def ask(self, name: str) -> Asked:
        return Asked(self, name)

    def serve(self, name: str) -> None:
        """A request from its beginning to its end."""
        asked = self.ask(name)
        self.loop.pass_time(LOAD_SECONDS + STOP_SECONDS)
        assert asked.has_model, asked.error
        asked.finish()

    def end(self) -> None:
        self.loop.run_until_complete(self.pool.close())
        self.loop.settle()
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not any(model.held for model in self.models.values())
        assert not left


@pytest.fixture
def world() -> Iterator[World]:
    world = World(a=6, b=6, small=3, big=10)
    yield world
    world.end()


def test_simultaneous_first_requests_load_once(world: World) -> None:
    asked = [world.ask("a") for _ in range(3)]
    world.loop.pass_time(LOAD_SECONDS)
    assert all(one.has_model for one in asked)
    assert world.models["a"].loads == 1
    assert world.events.all == [("loaded", "a", LOAD_SECONDS), *[("waited", "a", LOAD_SECONDS)] * 3]
    for one in asked:
        one.finish()


def test_loaded_model_is_given_at_once(world: World) -> None:
    world.serve("a")
    asked = world.ask("a")
    assert asked.has_model
    asked.finish()


def test_idle_model_used_longest_ago_makes_room(world: World) -> None:
    world.serve("a")
    world.serve("small")
    asked = world.ask("b")  # 6 of 10 are needed, 1 is free: a alone suffices
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert asked.has_model
    assert [world.pool.state(name) for name in ("a", "small", "b")] == ["unloaded", "loaded", "loaded"]
    assert ("unloaded", "a", MEMORY) in world.events.all
    asked.finish()


def test_no_more_models_are_unloaded_than_needed(world: World) -> None:
    world.serve("small")
    world.serve("a")
    asked = world.ask("b")  # small was used longest ago, but a must go in any case
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert asked.has_model
    assert world.pool.state("small") is State.LOADED
    asked.finish()


def test_busy_model_is_not_unloaded_and_the_wait_is_bounded(world: World) -> None:
    busy, asked = world.ask("a"), world.ask("b")
    world.loop.pass_time(LIMITS.load_timeout)
    assert asked.error
    assert (asked.error.status, asked.error.code, asked.error.retry_after) == (503, "model_no_memory", 5)
    assert busy.has_model
    assert world.models["b"].loads == 0
    busy.finish()


def test_waiting_model_is_loaded_when_the_busy_one_is_idle(world: World) -> None:
    busy, asked = world.ask("a"), world.ask("b")
    world.loop.pass_time(LOAD_SECONDS)
    assert not asked.has_model
    busy.finish()
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert asked.has_model
    asked.finish()


def test_model_in_constant_use_lets_a_waiting_one_pass(world: World) -> None:
    busy, asked = world.ask("a"), world.ask("b")
    for _ in range(4):  # the next request begins before the last one ends
        world.loop.pass_time(LIMITS.patience / 2)
        after = world.ask("a")
        busy.finish()
        busy = after
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert asked.has_model
    assert not busy.has_model
    asked.finish()
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert busy.has_model
    busy.finish()


def test_held_back_requests_go_on_when_the_waiting_one_gives_up(world: World) -> None:
    busy, asked = world.ask("a"), world.ask("b")
    world.loop.pass_time(LIMITS.patience + 1)
    held = world.ask("a")
    assert not held.has_model
    asked.cancel()
    assert held.has_model
    assert world.models["a"].loads == 1
    busy.finish()
    held.finish()


def test_model_behind_held_back_requests_gets_room_when_the_first_gives_up() -> None:
    world = World(a=6, big=10, idle=3, c=4)
    world.serve("idle")
    busy, big = world.ask("a"), world.ask("big")
    world.loop.pass_time(LIMITS.patience + 1)
    held, behind = world.ask("a"), world.ask("c")
    assert not held.has_model
    big.cancel()
    assert held.has_model
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert behind.has_model  # the idle model has made room, without waiting for the busy one
    for one in (busy, held, behind):
        one.finish()
    world.end()


def test_end_of_the_server_is_no_loss_of_a_model(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.serve("a")
    world.pool.refuse()
    world.models["a"].lose()  # as a second signal does
    world.loop.settle()
    assert "is lost" not in caplog.text


def test_small_model_passes_a_big_one_that_waits(world: World) -> None:
    busy, big = world.ask("a"), world.ask("big")
    world.loop.pass_time(1)
    small = world.ask("small")
    world.loop.pass_time(LOAD_SECONDS)
    assert small.has_model
    assert not big.has_model
    for one in (small, busy):
        one.finish()
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert big.has_model
    big.finish()


def test_failed_load_is_told_to_all_and_tried_again_later(world: World) -> None:
    world.models["a"].fails = 1
    asked = [world.ask("a"), world.ask("a")]
    world.loop.pass_time(LOAD_SECONDS)
    assert [(one.error.status, one.error.code) for one in asked if one.error] == [
        (503, "model_load_failed")
    ] * 2
    soon = world.ask("a")
    assert soon.error
    assert (soon.error.code, soon.error.retry_after, world.models["a"].loads) == ("model_load_failed", 5, 1)
    world.loop.pass_time(LIMITS.retry_seconds)
    world.serve("a")


def test_slow_load_is_told_and_goes_on(world: World) -> None:
    world.pool.limits = PoolLimits(BUDGET, load_timeout=LOAD_SECONDS / 2)
    asked = world.ask("a")
    world.loop.pass_time(LOAD_SECONDS / 2)
    assert asked.error
    assert asked.error.code == "model_loading"
    world.loop.pass_time(LOAD_SECONDS / 2)
    assert world.pool.is_ready("a")


def test_idle_model_is_unloaded_after_the_timeout(world: World) -> None:
    world.serve("a")
    world.loop.pass_time(LIMITS.idle_timeout - 5)
    again = world.ask("a")
    world.loop.pass_time(2 * LIMITS.idle_timeout)  # in use, however long
    assert again.has_model
    again.finish()
    world.loop.pass_time(LIMITS.idle_timeout - 1)
    assert world.pool.state("a") is State.LOADED
    world.loop.pass_time(1 + STOP_SECONDS)
    assert world.pool.state("a") is State.UNLOADED
    assert world.events.all[-1] == ("unloaded", "a", IDLE)


def test_lost_model_ends_after_its_requests_and_is_loaded_again(world: World) -> None:
    old = world.ask("a")
    world.loop.pass_time(LOAD_SECONDS)
    world.models["a"].lose()
    world.loop.settle()
    new = world.ask("a")
    assert not new.has_model
    old.finish()
    world.loop.pass_time(STOP_SECONDS + LOAD_SECONDS)
    assert new.has_model
    assert ("unloaded", "a", LOST) in world.events.all
    new.finish()


def test_waiting_requests_are_bounded(world: World) -> None:
    asked = [world.ask("a") for _ in range(LIMITS.max_waiting + 1)]
    assert [one.error and one.error.status for one in asked] == [None, None, None, 429]
    world.loop.pass_time(LOAD_SECONDS)
    for one in asked:
        one.finish()


def test_end_of_the_server_refuses_and_unloads(world: World) -> None:
    running = world.ask("small")
    world.loop.pass_time(LOAD_SECONDS)
    waiting = world.ask("a")
    world.pool.refuse()
    world.loop.settle()
    late = world.ask("small")
    assert [one.error and one.error.code for one in (waiting, late)] == ["server_shutdown"] * 2
    assert running.has_model
    running.finish()


def test_load_that_finds_a_greater_need_makes_room_afterwards() -> None:
    world = World(a=4, b=4)
    world.serve("a")
    world.models["b"].num_bytes = 8
    asked = world.ask("b")
    assert world.pool.reserved_bytes == 12 - 4  # as known before
    world.loop.pass_time(LOAD_SECONDS + STOP_SECONDS)
    assert (world.pool.state("a"), world.pool.reserved_bytes) == (State.UNLOADED, 8)
    asked.finish()
    world.end()


NAMES = st.sampled_from(["a", "b", "c", "d"])


class Histories(RuleBasedStateMachine):
    """Random requests, ends, failures, losses and times."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(a=3, b=4, c=6, d=10)
        self.asked: list[Asked] = []
        self.before = 0

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        self.asked.append(self.world.ask(name))

    @rule(at=st.integers(0, 20))
    def finish(self, at: int) -> None:
        if running := [one for one in self.asked if one.has_model]:
            running[at % len(running)].finish()

    @rule(at=st.integers(0, 20))
    def cancel(self, at: int) -> None:
        if open_ := [one for one in self.asked if not one.task.done()]:
            open_[at % len(open_)].cancel()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 3.0, 11.0, 61.0, 301.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.loop.pass_time(seconds)

    @rule(name=NAMES)
    def break_the_next_load(self, name: str) -> None:
        self.world.models[name].fails = 1

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        model = self.world.models[name]
        if model.is_loaded and not any(one.has_model and one.name == name for one in self.asked):
            model.lose()
            self.world.loop.settle()

    @invariant()
    def the_budget_holds(self) -> None:
        held = sum(model.held for model in self.world.models.values())
        assert held <= BUDGET
        assert held == self.world.pool.reserved_bytes

    @invariant()
    def a_request_has_a_loaded_model(self) -> None:
        for one in self.asked:
            assert not one.has_model or self.world.models[one.name].is_loaded

    @invariant()
    def every_wait_is_known(self) -> None:
        """A wait without an entry in the pool would never end."""
        places = self.world.pool._places
        for name, place in places.items():
            waiting = [
                one for one in self.asked if one.name == name and not one.task.done() and not one.has_model
            ]
            assert len(place.turns) == len(waiting)
            assert place.users == len([one for one in self.asked if one.name == name and one.has_model])
            assert not waiting or place.state is State.LOADING or place in self.world.pool._queue

    def teardown(self) -> None:
        """Requests end within their time, idle models are unloaded, and nothing remains."""
        for _ in range(100):
            for one in [one for one in self.asked if one.has_model]:
                one.finish()
            self.world.loop.pass_time(1.0)
        assert all(one.task.done() for one in self.asked)
        self.world.loop.pass_time(LIMITS.idle_timeout + STOP_SECONDS + LOAD_SECONDS)
        assert not any(model.held for model in self.world.models.values())
        assert self.world.pool._timer is None or self.world.pool._timer.when() <= self.world.loop.time()
        self.world.end()


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase

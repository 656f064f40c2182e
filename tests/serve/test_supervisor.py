"""When an engine is started again, and when no more."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.runtime.process.client import EngineClient, EngineDied
from optkit.serve import supervisor
from optkit.serve.supervisor import EngineSupervisor, cpu_seconds


def idle() -> EngineSupervisor:
    return EngineSupervisor(lambda: EngineClient("", factory="tests.support.fakes:engine_from_json"))


def test_each_restart_waits_longer_and_the_fourth_death_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    watched = idle()
    assert [watched._next_delay() for _ in range(4)] == [0.0, 1.0, 2.0, None]
    now[0] += supervisor.WINDOW_SECONDS + 1
    assert watched._next_delay() == 0.0


def test_an_engine_that_never_started_is_not_restarting() -> None:
    watched = idle()
    assert not watched.is_healthy and not watched.is_restarting and not watched.gave_up


def test_processor_time_grows_with_work_and_is_unknown_of_nobody() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) <= before:
        sum(range(100_000))
    assert math.isnan(cpu_seconds(None))


def test_processor_time_of_a_child_counts() -> None:
    """A stage computes while rank 0 waits."""
    child = [
        sys.executable,
        "-c",
        "import time\nwhile time.process_time() < 0.6: pass\nprint(1, flush=True)\ninput()",
    ]
    parent = [sys.executable, "-c", f"import subprocess\nsubprocess.run({child!r})"]
    with subprocess.Popen(parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(process.pid) > 0.5
        process.communicate(b"\n")


class Client:
    """A client whose engine starts when ``may_start`` is set, and fails to with ``error``."""

    pid, is_silent = None, False

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.is_healthy, self.dead = error, False, asyncio.Event()
        self.may_start = asyncio.Event()

    async def start(self) -> dict[str, object]:
        await self.may_start.wait()
        if self.error:
            self.dead.set()
            raise self.error
        self.is_healthy = True
        return {}

    def die(self) -> None:
        self.is_healthy = False
        self.dead.set()

    async def wait_dead(self) -> None:
        await self.dead.wait()

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize("end", ["back", "gave up", "stopped"])
def test_whoever_waits_for_an_engine_is_woken_when_it_is_settled(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 0.0)

    async def go() -> bool:
        error = EngineDied("for the test") if end == "gave up" else None
        clients = [Client(), *(Client(error) for _ in range(supervisor.MAX_RESTARTS))]
        makes: Any = iter(clients)
        watched = EngineSupervisor(lambda: next(makes))
        clients[0].may_start.set()
        await watched.start()
        await asyncio.wait_for(watched._until_settled(), 60)
        clients[0].die()
        assert watched.is_restarting and not watched.is_healthy
        waiting = asyncio.create_task(watched._until_settled())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        if end == "stopped":
            await watched.stop()
        for client in clients[1:]:
            client.may_start.set()
        await asyncio.wait_for(waiting, 60)
        healthy = watched.is_healthy
        assert watched.num_restarts == (end == "back")
        await watched.stop()
        return healthy

    assert asyncio.run(go()) == (end == "back")


def test_engine_is_not_started_again_on_another_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 0.0)

    async def go() -> None:
        first, calls = Client(), 0

        def make() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserError("another artifact has taken its place")
            return first

        watched = EngineSupervisor(make)
        first.may_start.set()
        await watched.start()
        first.die()
        await asyncio.wait_for(watched.wait_gave_up(), 60)
        assert watched.gave_up and not watched.is_healthy and calls == 1 + supervisor.MAX_RESTARTS
        await watched.stop()

    asyncio.run(go())

"""Replicas as actors of a real Ray: answers, deaths of an engine and of an actor, and the way back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import ray

from optkit.fleet.config import FleetConfig
from optkit.fleet.engine import FleetEngine
from optkit.fleet.ray_handle import RayMembers
from optkit.fleet.ray_local import APP
from optkit.fleet.ray_replica import NAMESPACE, worker_name
from optkit.runtime.process.client import EngineClient
from optkit.runtime.types import EngineRequest
from tests.fleet_ray.conftest import PATIENCE
from tests.support.fleet import ask, on_loop, tokens_of


@asynccontextmanager
async def joined(count: int = 2) -> AsyncIterator[FleetEngine]:
    """The fleet with ``count`` ready replicas."""
    engine = FleetEngine(RayMembers(APP))
    await engine.start(PATIENCE)
    try:
        await ready(engine, count)
        yield engine
    finally:
        await engine.stop()


async def ready(engine: FleetEngine, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(engine.ready_ids) != count:
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("two_replicas")
@on_loop
async def test_answers_are_those_of_an_engine_process(two_replicas: FleetConfig) -> None:
    requests = [ask(str(i), list(range(2 + i, 30 + 2 * i)), 20) for i in range(12)]
    alone = EngineClient(two_replicas.artifact, factory=two_replicas.factory)
    await alone.start()
    expected = [await tokens_of(alone.generate(request)) for request in requests]
    await alone.stop()
    async with joined() as engine:
        assert await asyncio.gather(*(tokens_of(engine.generate(r)) for r in requests)) == expected
        assert engine.info is not None and engine.stats.kv_blocks_total == 2 * engine.info.config.num_blocks


@on_loop
async def test_an_answer_survives_the_death_of_its_engine(two_replicas: FleetConfig) -> None:
    request = ask(max_tokens=150)
    async with joined() as engine:
        expected = await tokens_of(engine.generate(ask("undisturbed", max_tokens=150)))
        serving = await serving_of(engine, running := Collected(engine, request))
        info = await engine._known[serving].member.engine_info()
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
        assert await running.tokens == expected
        assert running.longest_pause < 1.5 and engine.failover.num_migrations == 1
        await ready(engine, 2)
        assert engine.num_restarts == 1


@on_loop
async def test_an_answer_survives_the_death_of_its_actor_and_serve_brings_another(
    two_replicas: FleetConfig,
) -> None:
    request = ask(max_tokens=150)
    async with joined() as engine:
        expected = await tokens_of(engine.generate(ask("undisturbed", max_tokens=150)))
        serving = await serving_of(engine, running := Collected(engine, request))
        killed = time.monotonic()
        ray.kill(ray.get_actor(worker_name(APP, serving), namespace=NAMESPACE))
        assert await running.tokens == expected
        assert running.longest_pause < 1.5
        await ready(engine, 1)
        await ready(engine, 2)
        assert time.monotonic() - killed < 60.0  # 12 s on an idle machine
        assert serving not in [report.replica_id for report in engine.reports]


class Collected:
    """An answer that is being collected, with the longest time between two outputs."""

    def __init__(self, engine: FleetEngine, request: EngineRequest) -> None:
        self.longest_pause, self.count = 0.0, 0
        self.tokens = asyncio.create_task(self._collect(engine, request))

    async def _collect(self, engine: FleetEngine, request: EngineRequest) -> list[int]:
        found: list[int] = []
        last = time.monotonic()
        async for output in engine.generate(request):
            assert output.error is None, output.error
            now = time.monotonic()
            self.longest_pause, last = max(self.longest_pause, now - last), now
            found += output.token_ids
            self.count = len(found)
        return found


async def serving_of(engine: FleetEngine, running: Collected) -> str:
    """The replica that computes ``running``, after some tokens."""
    async with asyncio.timeout(PATIENCE):
        while True:
            busy = [report.replica_id for report in engine.reports if report.num_running]
            if running.count > 30 and len(busy) == 1:
                return busy[0]
            await asyncio.sleep(0.02)

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
from optkit.fleet.replica import ReplicaGone
from optkit.runtime.process.client import EngineClient
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
        while engine.num_ready != count:
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
        assert engine.info is not None and engine.stats.kv_blocks_total == 2 * 512


@on_loop
async def test_a_dead_engine_is_told_at_once_and_replaced(two_replicas: FleetConfig) -> None:
    async with joined() as engine:
        stream = engine.generate(ask(max_tokens=400))
        await anext(stream)
        (serving,) = [report for report in await fresh(engine) if report.num_running]
        info = await engine._known[serving.replica_id].member.engine_info()
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ReplicaGone) as caught:
            async for _ in stream:
                pass
        assert time.monotonic() - start < 1.0
        assert caught.value.was_begun and caught.value.replica_id == serving.replica_id
        assert await tokens_of(engine.generate(ask("b")))
        await ready(engine, 2)
        assert engine.num_restarts == 1


@on_loop
async def test_a_dead_actor_is_told_at_once_and_replaced_by_serve(two_replicas: FleetConfig) -> None:
    async with joined() as engine:
        stream = engine.generate(ask(max_tokens=400))
        await anext(stream)
        (serving,) = [report for report in await fresh(engine) if report.num_running]
        actor = ray.get_actor(worker_name(APP, serving.replica_id), namespace=NAMESPACE)
        start = time.monotonic()
        ray.kill(actor)
        with pytest.raises(ReplicaGone) as caught:
            async for _ in stream:
                pass
        assert time.monotonic() - start < 1.5
        assert caught.value.replica_id == serving.replica_id
        assert await tokens_of(engine.generate(ask("b")))
        await asyncio.sleep(1.0)
        await ready(engine, 2)
        print(f"\ncapacity back after {time.monotonic() - start:.1f} s")
        assert serving.replica_id not in [report.replica_id for report in engine.reports]


async def fresh(engine: FleetEngine) -> list:  # type: ignore[type-arg]
    """Reports of a moment after now."""
    await asyncio.sleep(0.6)
    return engine.reports

"""A fleet that grows under load and shrinks after it, by the policy in Serve's controller."""

from __future__ import annotations

import asyncio
import time

import msgspec

from optkit.fleet.autoscale import AutoscaleConfig
from optkit.fleet.engine import FleetEngine
from optkit.fleet.mock import MockModel
from optkit.fleet.ray_handle import RayMembers
from optkit.fleet.ray_local import APP
from tests.fleet_ray.conftest import PATIENCE, local_ray, mock_config
from tests.support.fleet import ask, on_loop, tokens_of

SLOW = MockModel(step_seconds=0.01, prompt_tokens_per_second=500.0)  # a prompt of 1,000 tokens takes 2 s
SCALING = AutoscaleConfig(ttft_seconds=1.0, min_replicas=1, max_replicas=2, down_seconds=5.0)


async def _until(engine: FleetEngine, count: int) -> float:
    """Wait for ``count`` ready replicas; returns the seconds."""
    start = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        while len(engine.ready_ids) != count:
            await asyncio.sleep(0.05)
    return time.monotonic() - start


async def _load(engine: FleetEngine, stop: asyncio.Event, index: int) -> None:
    """Prompts of 1,000 tokens, no two alike, until ``stop``; an answer that fails fails the test."""
    number = 0
    while not stop.is_set():
        prompt = [40 + (index * 7919 + number * 104729 + place) % 400 for place in range(1000)]
        assert len(await tokens_of(engine.generate(ask(f"{index}-{number}", prompt, 5)))) == 5
        number += 1


@on_loop
async def test_a_fleet_grows_under_load_and_shrinks_after_it() -> None:
    config = msgspec.structs.replace(mock_config(1, SLOW), autoscale=SCALING)
    with local_ray(config):
        engine = FleetEngine(RayMembers(APP))
        await engine.start(PATIENCE)
        try:
            stop = asyncio.Event()
            clients = [asyncio.create_task(_load(engine, stop, index)) for index in range(6)]
            await _until(engine, 2)
            stop.set()
            await asyncio.gather(*clients)
            await _until(engine, 1)
        finally:
            await engine.stop()

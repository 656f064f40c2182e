"""The HTTP application of a single server in front of a fleet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from optkit.fleet.engine import FleetEngine
from optkit.fleet.metrics import FleetMetrics
from optkit.fleet.placement import Placement
from optkit.runtime.info import EngineInfo
from optkit.runtime.scheduling.policy import seconds
from optkit.serve.app import create_app
from optkit.serve.server import AppParts, ServeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from optkit.artifact.open import Artifact


async def fleet_app(
    engine: FleetEngine, artifact: Artifact, options: ServeOptions, replicas: int
) -> tuple[FastAPI, EngineInfo]:
    """The application, once a replica of ``engine`` is ready; starts the engine.

    Args:
        replicas: of the fleet when full; requests run together and wait as in so many servers.
    """
    parts = AppParts(artifact, options)
    tokenizer = asyncio.create_task(asyncio.to_thread(parts.load_tokenizer))
    try:
        info = await engine.start()
        tpot = seconds(info.config.tpot_slo_ms) or None
        engine.router.tpot, engine.router.alternatives = tpot, Placement(tpot)
        words, chat = await tokenizer
    finally:
        tokenizer.cancel()
        await asyncio.gather(tokenizer, return_exceptions=True)
    settings = parts.settings(info, options.served_model_names or (artifact.name,))
    running_elsewhere = (replicas - 1) * info.config.max_num_seqs
    settings = replace(settings, max_queue=settings.max_queue + running_elsewhere)
    app = create_app(engine, words, settings, parts.tracing(), chat, parts.defaults())
    app.state.parts.metrics.registry.register(FleetMetrics(engine))
    return app, info

"""The applications of Ray Serve (imports Ray): HTTP servers, and replicas of an artifact, built from a ``FleetConfig``.

``optkit.fleet.ray_app:build`` and ``build_replicas`` are import paths in Serve configs (``optkit.fleet.manifests``). A
server tokenizes, chooses a replica, calls it and detokenizes; the HTTP application is the same as in ``optkit serve``,
behind Serve's proxies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from ray import serve

from optkit.fleet.config import FleetConfig, read_config
from optkit.fleet.engine import FleetEngine
from optkit.fleet.examine import Exam
from optkit.fleet.manifests import SERVERS
from optkit.fleet.ray_examine import exam_deployment
from optkit.fleet.ray_handle import RayMembers
from optkit.fleet.ray_replica import replica_deployment
from optkit.fleet.router import Router
from optkit.fleet.secrets import digest_secret
from optkit.fleet.server import fleet_app
from optkit.machine import logs
from optkit.serve.server import check


class Api:
    """An HTTP server of a fleet."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        logs.configure()
        config = read_config(args)
        options = config.http.options()
        check(options)
        self._engine = FleetEngine(RayMembers(config.name), Router(digest_secret(config.name)))
        artifact = await asyncio.to_thread(config.open)
        self._fastapi, _ = await fleet_app(self._engine, artifact, options, config.most_replicas)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._fastapi

    async def __del__(self) -> None:
        if hasattr(self, "_fastapi"):
            self._fastapi.state.draining = True
        if hasattr(self, "_engine"):
            await self._engine.stop()


def build(args: dict[str, Any]) -> serve.Application:
    """The application of the HTTP servers of the fleet in ``args`` (``optkit.fleet.config.FleetConfig``)."""
    return api_deployment(read_config(args)).bind(args)  # type: ignore[no-any-return]


def build_replicas(args: dict[str, Any]) -> serve.Application:
    """The application of the replicas of the artifact in ``args``."""
    return replica_deployment(read_config(args)).bind(args)  # type: ignore[no-any-return]


def build_exam(args: dict[str, Any]) -> serve.Application:
    """The application of an examination (``optkit.fleet.examine.Exam``)."""
    Exam.read(args)
    return exam_deployment().bind(args)  # type: ignore[no-any-return]


def api_deployment(config: FleetConfig) -> serve.Deployment:
    """The deployment of the HTTP servers. A new server starts before an old one ends."""
    return serve.deployment(  # type: ignore[no-any-return]
        serve.ingress()(Api),
        name=SERVERS,
        num_replicas=config.servers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the server refuses by its own limits, with 429
        max_surge_percent=100,
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_seconds,
        max_constructor_retry_count=3,
    )

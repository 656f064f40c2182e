"""The application of Ray Serve (imports Ray): HTTP servers and replicas, built from a ``FleetConfig``.

``optkit.fleet.ray_app:build`` is the import path in Serve configs. A server tokenizes, chooses a replica, calls the
replica's actor and detokenizes; the HTTP application is the same as in ``optkit serve``, behind Serve's proxies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from ray import serve

from optkit.fleet.config import FleetConfig, read_config
from optkit.fleet.engine import FleetEngine
from optkit.fleet.ray_handle import RayMembers
from optkit.fleet.ray_replica import replica_deployment
from optkit.fleet.router import Router
from optkit.fleet.secrets import digest_secret
from optkit.fleet.server import fleet_app
from optkit.machine import logs
from optkit.serve.server import check


class Api:
    """An HTTP server of a fleet.

    Args:
        replicas: the handle of the replicas, by which Serve deploys both together; calls go to the actors.
    """

    async def __init__(self, args: dict[str, Any], replicas: object) -> None:  # type: ignore[misc]
        logs.configure()
        config = read_config(args)
        options = config.http.options()
        check(options)
        app = serve.get_replica_context().app_name
        self._engine = FleetEngine(RayMembers(app), Router(digest_secret(app)))
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
    """The application of the fleet in ``args`` (``optkit.fleet.config.FleetConfig``)."""
    config = read_config(args)
    replicas = replica_deployment(config).bind(args)
    return api_deployment(config).bind(args, replicas)  # type: ignore[no-any-return]


def api_deployment(config: FleetConfig) -> serve.Deployment:
    """The deployment of the HTTP servers."""
    return serve.deployment(  # type: ignore[no-any-return]
        serve.ingress()(Api),
        name="Api",
        num_replicas=config.servers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the server refuses by its own limits, with 429
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_seconds,
        max_constructor_retry_count=3,
    )

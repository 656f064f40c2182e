"""A fleet on the local machine (imports Ray): ``optkit serve artifact/ --replicas N``.

The HTTP server is the command's own process, as without a fleet; Ray Serve keeps the replicas. The local Ray listens on
loopback, asks for a token made at the start, and ends with the command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.errors import UserError, first_line
from optkit.fleet.call_thread import CallThread
from optkit.fleet.cluster import reason_in
from optkit.fleet.config import FleetConfig, threads_and_cpus
from optkit.fleet.engine import FleetEngine
from optkit.fleet.router import Router
from optkit.fleet.secrets import digest_secret
from optkit.fleet.server import fleet_app
from optkit.machine.target import usable_cores
from optkit.serve.http.address import bind
from optkit.serve.process import ServerProcess, loop_factory, print_line
from optkit.serve.server import ServeOptions, check, describe_memory

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("optkit.fleet")

APP = "optkit"
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large is put there; Ray takes 78 MB at least
STATUS_SECONDS = 0.5
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to Ray's makers
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # else SIGTERM, the usual end, prints a stack
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray gives replicas 15: each step would wait for all else on the machine
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # looks of Serve at the replicas; ten a second take 4 % of a core
    "RAY_enable_metrics_collection": "0",  # of Ray itself, for a dashboard that is not there
    "RAY_event_stats": "0",  # the same
    "RAY_task_events_report_interval_ms": "0",  # the same
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on each system: Ray's ports are on loopback alone
}


def run(
    directory: Path,
    options: ServeOptions,
    replicas: int,
    prefill: int = 0,
    announce: Callable[[str], None] = print_line,
) -> int:
    """Serve ``replicas`` replicas of an artifact on the local machine until a signal; returns the exit code.

    Args:
        prefill: replicas that prefer to compute the prompts of the others.

    Raises:
        UserError: as ``optkit.serve.server.run``, or Ray does not start.
    """
    check(options)
    with bind(options.host, options.port) as sock:
        artifact = Artifact.open(directory)
        threads, cpus = threads_and_cpus(artifact, options.engine, max(1, usable_cores() // replicas))
        config = FleetConfig(
            artifact=str(directory.resolve()),
            digest=content_digest(artifact.manifest),
            engine={**options.engine, "threads": threads},
            replicas=replicas,
            prefill=prefill,
            cpus=cpus,
            gpus=0 if artifact.recipe.target == "cpu" else 1,
            drain_seconds=options.request_timeout or 600.0,
        )
        return serve_fleet(artifact, config, options, sock, announce)


def serve_fleet(
    artifact: Artifact,
    config: FleetConfig,
    options: ServeOptions,
    sock: socket.socket,
    announce: Callable[[str], None],
) -> int:
    """Serve the replicas of ``config`` on the bound ``sock`` until a signal; returns the exit code."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_FleetServer(artifact, config, options, sock, announce).run())


def set_environment() -> None:
    """Set Ray's environment variables where the user has not. Ray reads the variables on import."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def run_replicas(config: FleetConfig) -> None:
    """Have the connected cluster run Serve without proxies, and the replicas of ``config``."""
    from ray import serve

    from optkit.fleet.ray_replica import replica_deployment

    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    target = serve.RunTarget(
        replica_deployment(config).bind(config.of_replicas.to_args()),
        name=APP,
        route_prefix=None,
        logging_config={"log_level": "WARNING"},
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


class LocalRay:
    """A Ray cluster of the local machine alone, with Serve and the replicas of ``config``."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config

    def start(self) -> None:
        """Start Ray and Serve, and have Serve start the replicas. Blocks for seconds.

        Raises:
            UserError: Ray does not start.
        """
        set_environment()
        import ray

        from optkit.fleet.ray_replica import NAMESPACE

        config = self._config
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            ray.init(
                address="local",
                num_cpus=max(1, round(config.most_replicas * config.cpus)),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
            )
            run_replicas(config)
        except (RuntimeError, ConnectionError, OSError, ValueError, TimeoutError) as error:
            raise UserError(f"Ray does not start: {first_line(error)}", where="--replicas") from error

    def problem(self) -> str | None:
        """The reason why there are no replicas and none will come; None while there is hope. Blocks for a call."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        found = serve.status().applications.get(APP)
        if found is None or found.status != ApplicationStatus.DEPLOY_FAILED:
            return None
        texts = [deployment.message for deployment in found.deployments.values()]
        return reason_in(" ".join([found.message, *texts]))

    def stop(self) -> None:
        """End Ray with all processes."""
        import ray

        ray.shutdown()


class _FleetServer(ServerProcess):
    """A run of the server of a local fleet."""

    def __init__(
        self,
        artifact: Artifact,
        config: FleetConfig,
        options: ServeOptions,
        sock: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        super().__init__(options, sock, announce)
        self._artifact, self._config = artifact, config
        self._ray = LocalRay(config)
        self._calls = CallThread()
        self._engine: FleetEngine | None = None
        self._starting: asyncio.Future[None] | None = None

    async def make_app(self) -> tuple[FastAPI, str, str]:
        self._starting = asyncio.ensure_future(self._calls.run(self._ray.start))
        await asyncio.shield(self._starting)
        from optkit.fleet.ray_handle import RayMembers

        self._engine = FleetEngine(RayMembers(APP), Router(digest_secret(APP)))
        making = asyncio.create_task(
            fleet_app(self._engine, self._artifact, self._options, self._config.most_replicas)
        )
        try:
            while not making.done():
                await asyncio.wait([making], timeout=STATUS_SECONDS)
                problem = None if making.done() else await self._calls.run(self._ray.problem)
                if problem:
                    raise UserError(f"no replica starts: {problem}", where="--replicas")
            app, info = making.result()
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        words = f"{self._config.replicas} replicas of {self._config.cpus:g} threads, each: {describe_memory(info)}"
        return app, self._artifact.name, words

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch()]

    async def _watch(self) -> None:
        """End the server when no replica is there and none will come."""
        while True:
            await asyncio.sleep(10 * STATUS_SECONDS)
            is_lost = self._engine is not None and not self._engine.is_healthy
            if is_lost and await self._calls.run(self._ray.problem) is not None:
                self.fail()
                return

    def on_first_signal(self) -> None:
        """Nothing: Serve may start replicas to the end, which is the end of Ray."""

    def kill_engines(self) -> None:
        self._ray.stop()

    async def stop_engines(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
        if self._starting is not None:
            await asyncio.wait([self._starting])  # a Ray that is half started can't be stopped
            await self._calls.run(self._ray.stop)

"""A replica in a Ray cluster (imports Ray): a deployment of Ray Serve, and an actor with the engine.

Serve starts, places, checks, scales and replaces ``EngineReplica``s, and requests go elsewhere: each starts a
``Worker``: an actor with a supervisor and an engine process, called by servers directly. Both end together, so Serve
replaces both. After the death of an engine alone the worker's supervisor starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ReplicaRank

from optkit.artifact.manifest import content_digest
from optkit.errors import UserError, first_line
from optkit.fleet.autoscale import metrics_of
from optkit.fleet.channel import ChannelServer
from optkit.fleet.config import FleetConfig, read_config
from optkit.fleet.local import LocalReplica
from optkit.fleet.manifests import REPLICAS
from optkit.fleet.replica import ReplicaGone
from optkit.fleet.secrets import digest_secret
from optkit.fleet.served_replica import ServedReplica
from optkit.machine import logs
from optkit.recipe.engine_options import engine_options
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.process.client import EngineClient
from optkit.runtime.process.launch import DEFAULT_FACTORY, launch
from optkit.serve.server import client_maker
from optkit.serve.supervisor import EngineSupervisor

log = logging.getLogger("optkit.fleet")

NAMESPACE = "optkit"
MAX_CALLS = 10_000  # of a worker at once; the engine and the server have limits of their own
PREFILL_WEIGHT = 4.0  # of replicas that prefer prompts of others: a second there counts as a quarter
STARTING = "the replica is starting"


class Worker(ServedReplica):
    """The actor with the engine. ``start`` comes first; other calls fail before."""

    def __init__(self, args: dict[str, Any], replica_id: str, secret: bytes) -> None:
        logs.configure()
        self._config, self._replica_id, self._secret = read_config(args), replica_id, secret
        self._supervisor: EngineSupervisor | None = None
        self._channel: ChannelServer | None = None
        self._address: tuple[str, int] | None = None

    async def start(self) -> str | None:
        """Load the engine; returns the error of a config or an unusable artifact, as a line."""
        try:
            self._supervisor = await _supervised(self._config, self._secret)
        except UserError as error:
            return error.line()
        self._local = LocalReplica(self._supervisor, self._replica_id, self._config.digest)
        self._local.is_held = True  # until the deployment says otherwise
        super().__init__(self._local)
        self._channel = ChannelServer(self, self._secret)
        self._address = await self._channel.start(ray.util.get_node_ip_address())
        return None

    async def admit(self, is_open: bool, rank: int) -> None:
        """Let requests of clients come, or only requests that ask for this version.

        Args:
            rank: among the replicas of the version; the first ones prefer prompts of other replicas.
        """
        self._local.is_held = not is_open
        self._local.prefill_weight = PREFILL_WEIGHT if rank < self._config.prefill else 1.0

    async def load(self) -> dict[str, float]:
        """The work of the replica, as metrics of Ray Serve."""
        return metrics_of(self._local.load())

    async def report(self, since: bytes) -> bytes:
        if self._supervisor is None:
            raise ReplicaGone(STARTING, was_begun=False, replica_id=self._replica_id)
        return await super().report(since)

    async def address(self) -> tuple[str, int]:
        """Host and port for links (``optkit.fleet.channel``)."""
        if self._address is None:
            raise ReplicaGone(STARTING, was_begun=False, replica_id=self._replica_id)
        return self._address

    async def drain(self) -> None:
        """Take no new requests; return when the last output has been sent."""
        await super().drain()
        if self._channel is not None:
            await self._channel.flushed()

    async def until_lost(self) -> None:
        """Return when there is no engine and none will come."""
        if self._supervisor is not None:
            await self._supervisor.wait_gave_up()

    async def stop(self) -> None:
        """End the links and the engine."""
        if self._channel is not None:
            await self._channel.close()
        if self._supervisor is not None:
            await self._supervisor.stop()


async def _supervised(config: FleetConfig, secret: bytes) -> EngineSupervisor:
    """The supervisor of a loaded engine, whose process imports while the artifact is verified.

    Args:
        secret: of digests.
    """
    address = f"{ray.util.get_node_ip_address()}:0"
    with launch(config.factory, config.artifact) as launched:
        if config.factory == DEFAULT_FACTORY:
            artifact = await asyncio.to_thread(config.open)
            options = engine_options(artifact.recipe, config.engine)
            setup = PeerSetup(address=address, version=content_digest(artifact.manifest))
            supervisor = EngineSupervisor(client_maker(artifact, options, launched, secret, setup))
        else:
            first, setup = [launched], PeerSetup(address=address, version=config.digest)
            supervisor = EngineSupervisor(
                lambda: EngineClient(
                    config.artifact,
                    engine_options(None, config.engine),
                    factory=config.factory,
                    launched=first.pop() if first else None,
                    cache_secret=secret,
                    peers=setup,
                )
            )
        await supervisor.start()
        return supervisor


class EngineReplica:
    """The part of a replica under Ray Serve's management."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        config = read_config(args).for_rank(context.rank.local_rank)
        name = context.replica_id.unique_id
        actor = ray.remote(Worker).options(  # type: ignore[attr-defined]
            name=worker_name(config.name, name),
            namespace=NAMESPACE,
            num_cpus=config.cpus,
            num_gpus=config.gpus,
            max_concurrency=MAX_CALLS,
            enable_task_events=False,  # a record of each call is work for the head node
        )
        self._worker = actor.remote(config.to_args(), name, digest_secret(config.name))
        problem = await self._worker.start.remote()
        if problem is not None:
            raise RuntimeError(problem)
        self._watching = asyncio.create_task(self._end_with_worker())

    async def _end_with_worker(self) -> None:
        """End the process when the worker has ended: Serve sees a dead actor at once, but a bad health three times."""
        try:
            await self._worker.until_lost.remote()
            reason = "the engine died again and again"
        except RayError as error:
            reason = first_line(error)
        log.error("the replica ends: %s", reason)
        os._exit(1)

    async def reconfigure(self, user_config: dict[str, Any], rank: ReplicaRank) -> None:
        """Take the user config of the deployment: ``open`` lets requests of clients come; called by Serve."""
        await self._worker.admit.remote(bool(user_config["open"]), rank.rank)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics for the autoscaling policy; called by Serve."""
        return await self._worker.load.remote()  # type: ignore[no-any-return]

    async def __del__(self) -> None:
        """Let running answers finish, then end the engine; Serve sends no replica away in another way."""
        watching = getattr(self, "_watching", None)
        if watching is None:
            return
        watching.cancel()
        await self._worker.drain.remote()
        await self._worker.stop.remote()
        ray.kill(self._worker)


def worker_name(fleet: str, replica_id: str) -> str:
    """The name of a worker's actor in ``NAMESPACE``."""
    return f"{fleet}/{replica_id}"


def replica_deployment(config: FleetConfig) -> serve.Deployment:
    """The deployment of the replicas: each on a single node, as many replicas as the config says."""
    bundle = {"CPU": config.cpus} | ({"GPU": config.gpus} if config.gpus else {})
    return serve.deployment(  # type: ignore[no-any-return]
        EngineReplica,
        name=REPLICAS,
        **config.scale(),
        user_config={"open": True},
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=256,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_seconds,
        max_constructor_retry_count=3,
    )

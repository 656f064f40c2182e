"""The way to the replicas of a Ray cluster (imports Ray): calls of their actors, and the list of the actors.

Tokens take another way (``optkit.fleet.channel``), whose address is asked by a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import list_named_actors

from optkit.errors import first_line
from optkit.fleet.channel import ChannelClient, connect
from optkit.fleet.ray_replica import NAMESPACE, worker_name
from optkit.fleet.remote_replica import RemoteReplica
from optkit.fleet.replica import ReplicaGone
from optkit.fleet.secrets import digest_secret

log = logging.getLogger("optkit.fleet")

LIST_SECONDS = 0.5  # between two looks at the cluster's actors


class RayStub:
    """The calls of a worker's actor (``optkit.fleet.wire.Stub``)."""

    def __init__(self, actor: ActorHandle, replica_id: str, secret: bytes) -> None:
        self._actor, self._replica_id, self._secret = actor, replica_id, secret

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            reason = first_line(error)
            raise ReplicaGone(reason, was_begun=False, replica_id=self._replica_id) from error

    async def link(self) -> ChannelClient:
        host, port = await self._call("address")
        return await connect(host, port, self._secret, self._replica_id)

    async def report(self, since: bytes) -> bytes:
        return bytes(await self._call("report", since))

    async def engine_info(self) -> bytes:
        return bytes(await self._call("engine_info"))

    async def embed(self, call: bytes) -> bytes:
        return bytes(await self._call("embed", call))

    async def pins(self, drop: str | None) -> bytes:
        return bytes(await self._call("pins", drop))

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def take_over(self, address: str, num_bytes: int) -> None:
        await self._call("take_over", address, num_bytes)

    async def start_profile(self, steps: int) -> bytes:
        return bytes(await self._call("start_profile", steps))

    async def stop_profile(self, directory: str) -> bytes:
        return bytes(await self._call("stop_profile", directory))

    async def drain(self) -> None:
        await self._call("drain")


class RayMembers:
    """The replicas of the fleet ``name``: the named actors, looked up every ``LIST_SECONDS``."""

    def __init__(self, name: str) -> None:
        self._name, self._secret = name, digest_secret(name)

    async def changes(self) -> AsyncIterator[Sequence[RemoteReplica]]:
        present: dict[str, RemoteReplica] = {}
        while True:
            try:
                actors = await asyncio.to_thread(self._actors, present.keys())
            except RayError as error:  # the head node restarts; replicas that live go on
                log.warning("the cluster's actors can't be listed: %s", first_line(error))
                actors = dict.fromkeys(present)
            if actors.keys() != present.keys():
                kept = {name: present[name] for name in present.keys() & actors.keys()}
                come = {name: actor for name, actor in actors.items() if actor is not None}
                present = kept | {name: self._member(name, actor) for name, actor in come.items()}
                yield list(present.values())
            await asyncio.sleep(LIST_SECONDS)

    def _member(self, replica_id: str, actor: ActorHandle) -> RemoteReplica:
        return RemoteReplica(RayStub(actor, replica_id, self._secret), replica_id)

    def _actors(self, known: Collection[str]) -> dict[str, ActorHandle | None]:
        """The actors by replica id; None for a known actor. Blocks for a call to the head node."""
        prefix = worker_name(self._name, "")
        entries = list_named_actors(all_namespaces=True)
        names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
        found: dict[str, ActorHandle | None] = {}
        for name in names:
            replica_id = name.removeprefix(prefix)
            if replica_id == name:
                continue
            if replica_id in known:
                found[replica_id] = None
                continue
            try:
                found[replica_id] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                log.debug("the replica %s has gone meanwhile", replica_id)
        return found

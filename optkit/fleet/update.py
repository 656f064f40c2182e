"""A rolling update of a fleet on a cluster, by the REST API of the dashboard (``optkit.fleet.rollout`` on Ray Serve).

Each version of the artifact is an application of Serve (``optkit.fleet.manifests.replicas``), and the update changes
their numbers of replicas: Serve starts, drains and ends them. Which replica leaves is Serve's choice. Whether replicas
take requests of clients is the user config of their deployment, so a replica that Serve replaces meanwhile behaves like
the others. Nothing is kept elsewhere: an update that ends in the middle leaves a fleet that serves, and the same
command goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from optkit.errors import UserError
from optkit.fleet.cluster import Cluster, NoAnswer, reason_in, status_of
from optkit.fleet.config import FleetConfig
from optkit.fleet.examine import BOUND, Exam
from optkit.fleet.manifests import (
    REPLICAS,
    REPLICAS_PATH,
    SERVERS_PATH,
    http_options,
    replicas,
    scaled,
    servers,
)
from optkit.fleet.rollout import ReplicaView, Rollout, Verdict, roll

log = logging.getLogger("optkit.fleet")

POLL_SECONDS = 0.5
SILENCE_SECONDS = 60.0  # of the dashboard, before an update ends
EXAM_SECONDS = 1800.0  # of an examination, after which it has failed
MOST_DEATHS = 1  # of new replicas during an update; machines die, too
EXAM_PATH = f"{__package__}.ray_app:build_exam"
LEAVING = ("STOPPING", "STOPPED")
RUNNING = ("RUNNING", "UPDATING")  # UPDATING: takes a user config while it serves

T = TypeVar("T")


@dataclass(frozen=True)
class Deployed:
    """A fleet as the cluster has it.

    Attributes:
        servers: the application of the HTTP servers; None: there is none.
        versions: the applications of replicas, by the digest of the artifact.
        counts: replicas of each version that do not leave.
    """

    servers: dict[str, Any] | None
    versions: dict[str, dict[str, Any]]
    counts: dict[str, int]

    def without(self, digest: str) -> list[str]:
        """The names of the applications of all versions but one."""
        return [app["name"] for version, app in self.versions.items() if version != digest]

    def with_names(self, config: FleetConfig) -> FleetConfig:
        """``config`` with the names of the model that clients use now; a new fleet's name is that of its artifact."""
        args = self.servers["args"] if self.servers is not None else config.to_args()
        names = args.get("http", {}).get("served_model_names") or (Path(args["artifact"]).name,)
        return msgspec.structs.replace(
            config, http=msgspec.structs.replace(config.http, served_model_names=tuple(names))
        )


def deployed(applications: Mapping[str, Mapping[str, Any]], name: str) -> Deployed:
    """The fleet ``name`` among the ``applications`` of a cluster (``Cluster.applications``)."""
    configs = [details.get("deployed_app_config") or {} for details in applications.values()]
    mine = [config for config in configs if config.get("args", {}).get("name", "optkit") == name]
    first = [config for config in mine if config.get("import_path") == SERVERS_PATH]
    versions = {
        str(config["args"].get("digest", "")): dict(config)
        for config in mine
        if config.get("import_path") == REPLICAS_PATH and applications[config["name"]]["status"] != "DELETING"
    }
    counts = {digest: len(_staying(applications[config["name"]])) for digest, config in versions.items()}
    return Deployed(dict(first[0]) if first else None, versions, counts)


def _replicas(details: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The replicas in the details of an application."""
    parts = (details or {}).get("deployments", {})
    found: list[dict[str, Any]] = parts.get(REPLICAS, {}).get("replicas", [])
    return found


def _is_open(application: Mapping[str, Any] | None) -> bool:
    """True where clients may come to the replicas of an application, which is the default of the deployment."""
    if application is None:
        return False
    for deployment in application.get("deployments") or ():
        return bool((deployment.get("user_config") or {}).get("open", True))
    return True


def _staying(details: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [each for each in _replicas(details) if each["state"] not in LEAVING]


class ClusterControl:
    """The means of an update of a fleet on a cluster (``optkit.fleet.rollout.FleetControl``).

    Args:
        present: the fleet, whose replicas of another version than ``config``'s are to be replaced.
        config: of the fleet with the new artifact.
        port: of the HTTP servers.
        bound: the most times of the new version, in those of the old.

    Raises:
        UserError: not exactly one other version is there.
    """

    def __init__(
        self, cluster: Cluster, present: Deployed, config: FleetConfig, port: int, bound: float = BOUND
    ) -> None:
        others = [digest for digest in present.versions if digest != config.digest]
        if len(others) != 1:
            what = f"{config.name} has {len(others)} other versions, and an update replaces one"
            raise UserError(
                what, where=cluster.address, fix="end an unfinished update first, or --strategy recreate"
            )
        self._cluster, self._config, self._port, self._bound = cluster, config, port, bound
        self._servers = present.servers
        self.old, self.new = others[0], config.digest
        self._apps = {self.old: present.versions[self.old], self.new: replicas(config)}
        self._counts = {version: present.counts.get(version, 0) for version in (self.old, self.new)}
        self._open = {version: _is_open(present.versions.get(version)) for version in (self.old, self.new)}
        self._named: list[str] = []  # replicas to drain, as far as Serve has not chosen
        self._exam: dict[str, Any] | None = None
        self._shown: Mapping[str, Mapping[str, Any]] = {}  # the dashboard's last answer
        self._heard = time.monotonic()
        self._views: Sequence[ReplicaView] = []
        self._serving: set[str] = set()  # new replicas that were seen to serve
        self._alarm, self._num_deaths = "", 0
        self._turn = asyncio.Lock()  # of calls that change the cluster

    # -- the fleet --------------------------------------------------------------------------------------

    async def view(self) -> Sequence[ReplicaView]:
        """The replicas as Serve shows them, with the effect of all actions so far.

        Without an answer of the dashboard they are those of the last answer, with the actions since: a replica that was
        told to go is not counted on.
        """
        is_new = await self._ask()
        self._views = [
            view
            for version in (self.old, self.new)
            for view in self._version(version, self._shown.get(self._apps[version]["name"]))
        ]
        if is_new:
            self._watch(self._shown.get(self._apps[self.new]["name"]))
        return self._views

    async def _ask(self) -> bool:
        """Take what the dashboard shows; False where it does not answer and has answered not long ago."""
        try:
            self._shown = await asyncio.to_thread(self._cluster.applications)
        except NoAnswer:
            if not self._shown:
                self._shown = await _patiently(self._cluster.applications)
            elif time.monotonic() - self._heard <= SILENCE_SECONDS:
                return False
            else:
                raise
        self._heard = time.monotonic()
        return True

    def _version(self, version: str, details: Mapping[str, Any] | None) -> list[ReplicaView]:
        """The replicas of a version: Serve's, less those told to go, and those told to come."""
        found, staying = _replicas(details), _staying(details)
        surplus = max(0, len(staying) - self._counts[version])
        order = sorted(
            staying, key=lambda each: (each["replica_id"] not in self._named, each["state"] in RUNNING)
        )
        going = {each["replica_id"] for each in order[:surplus]}
        views = []
        for each in found:
            name, state = each["replica_id"], each["state"]
            is_draining = state in LEAVING or name in going
            views.append(ReplicaView(name, version, state in RUNNING, is_draining, int(is_draining)))
        missing = max(0, self._counts[version] - len(staying))
        return views + [
            ReplicaView(f"coming-{version[:6]}-{index}", version, False) for index in range(missing)
        ]

    def _watch(self, details: Mapping[str, Any] | None) -> None:
        """Note a version that does not start, and deaths of its replicas."""
        status, message = status_of(details)
        if status == "DEPLOY_FAILED":
            self._alarm = f"the new version does not start: {reason_in(message)}"
        present = {each["replica_id"] for each in _replicas(details)}
        self._num_deaths += len(self._serving - present)
        serving = {each["replica_id"] for each in _staying(details) if each["state"] in RUNNING}
        going = {view.replica_id for view in self._views if view.is_draining}
        self._serving = serving - going
        if self._num_deaths > MOST_DEATHS:
            self._alarm = f"{self._num_deaths} replicas of the new version died"

    async def alarm(self) -> str:
        return self._alarm

    async def add(self, version: str) -> None:
        self._counts[version] += 1
        await self._apply()

    async def drain(self, replica_id: str) -> None:
        version = next(view.version for view in self._views if view.replica_id == replica_id)
        self._counts[version] = max(0, self._counts[version] - 1)
        self._named.append(replica_id)
        await self._apply()

    async def remove(self, replica_id: str) -> None:
        """Nothing: Serve ends a replica when it has drained."""

    async def shift(self, share: float) -> None:
        """Let clients to each version with a share; the router divides them by predicted times."""
        wanted = {self.old: share < 1, self.new: share > 0}
        if wanted != self._open:
            self._open = wanted
            await self._apply()

    async def finish(self) -> None:
        """Leave the version that has stayed, and after an update the HTTP servers as configured."""
        self._exam = None
        if self._counts[self.new] and not self._counts[self.old]:
            ends = [self._apps[self.old]["name"], self._exam_name]
            applications = [replicas(self._config), *([servers(self._config)] if self._servers else [])]
            config = {**http_options(self._config, self._port), "applications": applications}
            await _patiently(self._cluster.deploy, config, ends)
        else:
            await self._apply()

    async def _apply(self) -> None:
        """Have the cluster as it should be now."""
        async with self._turn:
            versions = [
                scaled(self._apps[version], count, is_open=self._open[version])
                for version, count in self._counts.items()
                if count
            ]
            extra = [part for part in (self._servers, self._exam) if part is not None]
            ends = [self._apps[version]["name"] for version, count in self._counts.items() if not count]
            ends += [] if self._exam else [self._exam_name]
            config = {**http_options(self._config, self._port), "applications": [*versions, *extra]}
            await _patiently(self._cluster.deploy, config, ends)

    # -- verdicts ---------------------------------------------------------------------------------------

    @property
    def _exam_name(self) -> str:
        return f"{self._config.name}-examination"

    async def test(self, replica_id: str) -> Verdict:
        is_mock = "factory" in self._apps[self.new]["args"]
        versions = ("", "") if is_mock else (self.old, self.new)
        old, new = (str(self._apps[version]["args"]["artifact"]) if version else "" for version in versions)
        return await self._examined(
            Exam(fleet=self._config.name, kind="test", canary=replica_id, old=old, new=new)
        )

    async def judge(self, canary: str, baseline: str) -> Verdict:
        return await self._examined(
            Exam(fleet=self._config.name, kind="compare", canary=canary, baseline=baseline, bound=self._bound)
        )

    async def _examined(self, exam: Exam) -> Verdict:
        """The verdict of an application that exists for the examination alone."""
        self._exam = {
            "name": self._exam_name,
            "route_prefix": None,
            "import_path": EXAM_PATH,
            "args": {**exam.to_args(), "number": time.time_ns()},
        }
        try:
            await self._apply()
            end = time.monotonic() + EXAM_SECONDS
            while time.monotonic() < end:
                await asyncio.sleep(POLL_SECONDS)
                found = (await _patiently(self._cluster.applications)).get(self._exam_name)
                if (
                    found is None
                    or (found.get("deployed_app_config") or {}).get("args") != self._exam["args"]
                ):
                    continue  # the examination before, or none yet
                status, message = status_of(found)
                if status == "RUNNING":
                    return Verdict(True, _held(exam))
                if status == "DEPLOY_FAILED":
                    return Verdict(False, reason_in(message))
            return Verdict(False, f"the examination had no end within {EXAM_SECONDS / 60:g} minutes")
        finally:
            self._exam = None
            await self._apply()


async def _patiently(call: Callable[..., T], *arguments: Any) -> T:
    """The dashboard's answer to ``call``, a blocking method; without an answer, asked again for SILENCE_SECONDS."""
    end = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            return await asyncio.to_thread(call, *arguments)
        except NoAnswer:
            if time.monotonic() >= end:
                raise
            await asyncio.sleep(POLL_SECONDS)


def _held(exam: Exam) -> str:
    if exam.kind == "test":
        return "prompts have the same answers twice"
    return f"time to first token and time per token are within {exam.bound:g}x of the old one's, at 95 % confidence"


async def update(control: ClusterControl, rollout: Rollout, tell: Callable[[str], None]) -> Rollout:
    """Perform the update; the cluster then has one version."""
    try:
        return await roll(rollout, control, POLL_SECONDS, tell)
    finally:
        if rollout.is_over:
            await control.finish()

"""A dashboard of Ray with Serve behind: applications that start, drain and end, a step at each look."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import httpx

from optkit.fleet.cluster import Cluster
from optkit.fleet.manifests import REPLICAS_PATH, SHOWN
from optkit.fleet.update import EXAM_PATH


class FakeServe:
    """Answers of the REST API for applications of fleets.

    Args:
        config: deployed and running.
        failing: the reason why replicas of any further version do not start; empty: they start.
        verdict: of examinations, by kind: the reason of a failure, empty for a pass.
        dice: of the time of each change.

    Attributes:
        fewest, most: replicas serving clients, and in existence, at any time.
        mixed: True once clients reached replicas before ``verdict`` was asked.
    """

    def __init__(
        self,
        config: dict[str, Any],
        failing: str = "",
        verdict: Callable[[str], str] = lambda kind: "",
        dice: random.Random | None = None,
    ) -> None:
        self.applications: dict[str, dict[str, Any]] = {}
        self.failing, self._verdict, self._dice = failing, verdict, dice or random.Random(0)
        self._numbers = itertools.count()
        self.exams: list[str] = []
        self._first = {app["name"] for app in config["applications"]}
        self._put(config)
        for _ in range(50):
            self._step()
        self.fewest = self.most = len(self._serving())
        self.mixed = False

    def cluster(self) -> Cluster:
        return Cluster("http://head:8265", None, httpx.MockTransport(self))

    def as_httpx(self) -> Any:
        """The module httpx with this dashboard behind."""
        original = httpx.Client

        class Module:
            HTTPError, BaseTransport = httpx.HTTPError, httpx.BaseTransport

            @staticmethod
            def Client(**options: Any) -> httpx.Client:
                return original(**{**options, "transport": httpx.MockTransport(self)})

        return Module

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            self._put(json.loads(request.content))
            return httpx.Response(200)
        self._step()
        shown = {
            name: {key: value for key, value in details.items() if key != "target"}
            for name, details in self.applications.items()
        }
        return httpx.Response(200, json={"applications": shown})

    def counts(self) -> dict[str, int]:
        """Replicas that serve, by the first digits of the artifact's digest."""
        found: dict[str, int] = {}
        for name, _ in self._serving():
            version = name[-SHOWN:]
            found[version] = found.get(version, 0) + 1
        return found

    def kill(self, version: str) -> None:
        """End a running replica of the version, which Serve replaces."""
        for details in self.applications.values():
            config = details["deployed_app_config"]
            if config["import_path"] == REPLICAS_PATH and config["args"]["digest"].startswith(version):
                running = [each for each in self._replicas(details) if each["state"] == "RUNNING"]
                if running:
                    self._replicas(details).remove(running[0])

    # -- Serve ------------------------------------------------------------------------------------------

    def _put(self, config: dict[str, Any]) -> None:
        named = {app["name"]: app for app in config["applications"]}
        for name, details in self.applications.items():
            if name not in named:
                details["status"], details["target"] = "DELETING", 0
        for name, app in named.items():
            if (
                name not in self.applications
                or self.applications[name]["deployed_app_config"]["args"] != app["args"]
            ):
                self.applications[name] = {
                    "status": "DEPLOYING",
                    "message": "",
                    "deployments": {},
                    "looks": 0,
                }
                for deployment in app.get("deployments", []):
                    part = {"message": "", "replicas": []}
                    self.applications[name]["deployments"][deployment["name"]] = part
            details = self.applications[name]
            if details["status"] == "DELETING":
                details["status"] = "DEPLOYING"
            details["deployed_app_config"] = app
            if app["import_path"] == REPLICAS_PATH:
                (deployment,) = app["deployments"]
                details["target"] = (
                    deployment.get("num_replicas") or deployment["autoscaling_config"]["min_replicas"]
                )

    def _step(self) -> None:
        for name, details in list(self.applications.items()):
            app = details["deployed_app_config"]
            details["looks"] += 1
            if app["import_path"] == EXAM_PATH:
                self._examine(details, app["args"]["kind"])
            elif app["import_path"] == REPLICAS_PATH:
                self._move(name, details)
            else:
                details["status"] = "RUNNING"
            if details["status"] == "DELETING" and not self._replicas(details):
                del self.applications[name]
        serving = self._serving()
        if hasattr(self, "fewest"):
            self.fewest = min(self.fewest, len(serving))
            alive = sum(len(self._replicas(details)) for details in self.applications.values())
            self.most = max(self.most, alive)
            strangers = {name for name, is_open in serving if is_open} - self._first
            self.mixed = self.mixed or (bool(strangers) and "test" not in self.exams)

    def _examine(self, details: dict[str, Any], kind: str) -> None:
        if details["status"] != "DEPLOYING" or self._dice.random() < 0.5:
            return
        self.exams.append(kind)
        reason = self._verdict(kind)
        details["status"] = "DEPLOY_FAILED" if reason else "RUNNING"
        details["message"] = f"Traceback ...\nRuntimeError: {reason}\n" if reason else ""

    def _move(self, name: str, details: dict[str, Any]) -> None:
        """Have the replicas of an application a step nearer to its target."""
        found = self._replicas(details)
        if self.failing and name not in self._first and details["target"]:
            details["status"] = "DEPLOY_FAILED"
            details["message"] = f"Traceback ...\nRuntimeError: {self.failing}\n"
            return
        for each in list(found):
            if self._dice.random() < 0.6:
                continue
            if each["state"] == "STOPPING":
                found.remove(each)
            elif each["state"] == "STARTING":
                each["state"] = "RUNNING"
        staying = [each for each in found if each["state"] != "STOPPING"]
        for each in sorted(staying, key=lambda each: each["state"] == "RUNNING")[
            : max(0, len(staying) - details["target"])
        ]:
            each["state"] = "STOPPING"
        for _ in range(details["target"] - len(staying)):
            found.append({"replica_id": f"r{next(self._numbers)}", "state": "STARTING"})
        if details["status"] != "DELETING":
            is_done = all(each["state"] == "RUNNING" for each in found)
            details["status"] = "RUNNING" if is_done else "DEPLOYING"

    def _replicas(self, details: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = details["deployments"].get("EngineReplica", {}).get("replicas", [])
        return found

    def _serving(self) -> list[tuple[str, bool]]:
        """The application of each running replica, and whether clients may come."""
        return [
            (name, details["deployed_app_config"]["deployments"][0]["user_config"]["open"])
            for name, details in self.applications.items()
            for each in self._replicas(details)
            if each["state"] == "RUNNING"
        ]

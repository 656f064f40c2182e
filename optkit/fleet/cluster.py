"""Deploying to a running Ray cluster, by the REST API of the dashboard; needs no Ray here."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx

from optkit.errors import UserError
from optkit.fleet.secrets import TOKEN_FILE

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
PATH = "/api/serve/applications/"
TIMEOUT = 30.0  # of a call
POLL_SECONDS = 1.0


class NoAnswer(UserError):
    """The dashboard could not be reached."""


class Cluster:
    """The dashboard at ``address``, an http or https URL.

    Raises:
        UserError: each method, when the cluster does not answer or refuses.
    """

    def __init__(
        self, address: str, token: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(
                "the address of a cluster is the URL of its dashboard",
                where=f"--address {address}",
                fix="for example http://head:8265",
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.address = address.rstrip("/")
        self._client = httpx.Client(
            base_url=self.address, headers=headers, timeout=TIMEOUT, transport=transport
        )

    def deploy(self, config: dict[str, Any], ends: Collection[str] = ()) -> None:
        """Apply the applications in ``config``; other applications of the cluster stay.

        Args:
            ends: names of applications that end.
        """
        present = self._call("GET")
        mine = {application["name"] for application in config["applications"]} | set(ends)
        others = [
            details["deployed_app_config"]
            for name, details in present.get("applications", {}).items()
            if name not in mine and details.get("deployed_app_config")
        ]
        paths = {other.get("route_prefix", "/"): other["name"] for other in others}
        paths.pop(None, None)  # without a path
        for application in config["applications"]:
            path = application["route_prefix"]
            if path in paths:
                what = f"the application {paths[path]} has the path {path} already"
                raise UserError(
                    what, where=self.address, fix="give another --root-path, or its --name to replace it"
                )
        self._call("PUT", config | {"applications": [*others, *config["applications"]]})

    def applications(self) -> dict[str, dict[str, Any]]:
        """The details of each application, by name."""
        found: dict[str, dict[str, Any]] = self._call("GET").get("applications", {})
        return found

    def wait(self, names: Sequence[str], timeout: float) -> None:
        """Return when the applications ``names`` are running.

        Raises:
            UserError: a failure, or no running application after ``timeout`` seconds.
        """
        end, left = time.monotonic() + timeout, list(names)
        while left:
            name = left[0]
            status, message = status_of(self.applications().get(name))
            if status == "RUNNING":
                left.pop(0)
                continue
            if status == "DEPLOY_FAILED":
                raise UserError(f"the deployment failed: {reason_in(message)}", where=self.address)
            if time.monotonic() > end:
                what = f"{name} is {status} after {timeout:g} s: {reason_in(message)}"
                raise UserError(what, where=self.address, fix="look at the dashboard, or give --timeout")
            time.sleep(POLL_SECONDS)

    def _call(self, method: str, body: object = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, PATH, json=body)
        except httpx.HTTPError as error:
            fix = "start one with ray start --head, or give --address http://HEAD:8265"
            raise NoAnswer("no Ray cluster answers here", where=self.address, fix=fix) from error
        if answer.status_code in (401, 403):
            fix = f"set RAY_AUTH_TOKEN, or put the token into {TOKEN_FILE}"
            raise UserError("the cluster wants another token", where=self.address, fix=fix)
        if answer.is_error:
            text = " ".join(answer.text.split())[-400:]
            raise UserError(f"the cluster answered {answer.status_code}: {text}", where=self.address)
        try:
            found = answer.json() if answer.content else {}
        except ValueError as error:
            raise UserError("this is no dashboard of Ray", where=self.address) from error
        return found if isinstance(found, dict) else {}


def status_of(details: Mapping[str, Any] | None) -> tuple[str, str]:
    """The status of an application, such as DEPLOYING, and the messages of the parts, from the details."""
    if details is None:
        return "NOT_STARTED", ""
    parts = details.get("deployments", {}).values()
    return str(details["status"]), " ".join(
        [details.get("message", ""), *(part["message"] for part in parts)]
    )


def reason_in(message: str) -> str:
    """The last error in the text of a failed deployment, which holds stack traces."""
    lines = [line.strip() for line in message.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else " ".join(message.split())[:400]

"""Deploying by the dashboard's REST API: other applications stay, and each refusal is one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from optkit.errors import UserError
from optkit.fleet.cluster import Cluster, reason_in
from optkit.fleet.config import FleetConfig
from optkit.fleet.manifests import serve_config

CONFIG = serve_config(FleetConfig(artifact="/a", name="mine", digest="d1"), 8000)


class Dashboard:
    """A dashboard with the applications of ``present``, by name."""

    def __init__(self, present: dict[str, dict[str, Any]]) -> None:
        self.present, self.puts = present, list[dict[str, Any]]()
        self.headers: dict[str, str] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers = dict(request.headers)
        if request.method == "PUT":
            self.puts.append(json.loads(request.content))
            return httpx.Response(200)
        return httpx.Response(200, json={"applications": self.present})


def cluster(answer: Callable[[httpx.Request], httpx.Response], token: str | None = None) -> Cluster:
    return Cluster("http://head:8265/", token, httpx.MockTransport(answer))


def test_other_applications_stay_and_the_own_one_is_replaced() -> None:
    other = {"name": "other", "route_prefix": "/other", "import_path": "x:y", "args": {}}
    board = Dashboard(
        {
            "other": {"deployed_app_config": other, "status": "RUNNING"},
            "mine": {"deployed_app_config": {"name": "mine", "import_path": "old:old"}},
            "mine-d0": {"deployed_app_config": {"name": "mine-d0", "import_path": "old:old"}},
            "by_code": {"deployed_app_config": None},
        }
    )
    cluster(board, "secret").deploy(CONFIG, ["mine-d0"])
    assert board.puts[0]["applications"] == [other, *CONFIG["applications"]]
    assert board.headers["authorization"] == "Bearer secret"


def test_two_applications_have_no_path_in_common() -> None:
    other = {"name": "other", "route_prefix": "/", "import_path": "x:y"}
    with pytest.raises(UserError, match="other has the path / already"):
        cluster(Dashboard({"other": {"deployed_app_config": other}})).deploy(CONFIG)


def test_wait_returns_when_it_runs_and_tells_why_it_failed() -> None:
    board = Dashboard({"mine": {"status": "RUNNING", "message": "", "deployments": {}}})
    cluster(board).wait(["mine"], 1.0)
    trace = "The deployment failed to start 3 times. Traceback ...\n  RuntimeError: a: no artifact here.\n"
    part = {"EngineReplica": {"message": trace}}
    board.present = {"mine": {"status": "DEPLOY_FAILED", "message": "x", "deployments": part}}
    with pytest.raises(UserError, match="a: no artifact here"):
        cluster(board).wait(["mine"], 1.0)
    board.present = {}
    with pytest.raises(UserError, match="NOT_STARTED"):
        cluster(board).wait(["mine"], 0.0)


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (refused, "no Ray cluster answers here"),
        (lambda request: httpx.Response(401), "RAY_AUTH_TOKEN"),
        (lambda request: httpx.Response(400, text="bad\nconfig"), "400: bad config"),
        (lambda request: httpx.Response(200, text="<html>"), "no dashboard"),
    ],
)
def test_refusals_are_one_line(answer: Callable[[httpx.Request], httpx.Response], text: str) -> None:
    with pytest.raises(UserError) as caught:
        cluster(answer).deploy(CONFIG)
    assert text in caught.value.line()


def test_an_address_is_a_url() -> None:
    with pytest.raises(UserError, match="http://head:8265"):
        Cluster("ray://head:10001")


def test_the_reason_is_the_last_error_or_the_text() -> None:
    assert reason_in("Traceback\nValueError: first\nRuntimeError: last one.\n  at x") == "last one."
    assert reason_in("just\n words") == "just words"

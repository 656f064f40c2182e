"""``/start_profile`` and ``/stop_profile``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.serve_fakes import FakeEngine, call, tiny_app

START, STOP = "/start_profile", "/stop_profile"


def answer(app: Any, path: str) -> tuple[int, dict[str, Any]]:
    response = call(app, "POST", path)
    return response.status_code, response.json()


@pytest.mark.parametrize("path", [START, STOP])
def test_profiles_are_off_without_a_directory(path: str) -> None:
    engine = FakeEngine()
    status, body = answer(tiny_app(engine), path)
    assert (status, body["error"]["code"]) == (404, "profiling_disabled") and "--profile-dir" in body[
        "error"
    ]["message"]
    assert engine.profiled_steps == 0


def test_a_profile_is_started_once_and_stopped_once() -> None:
    engine = FakeEngine()
    app = tiny_app(engine, profile_dir="/srv/profiles")
    assert answer(app, STOP)[0] == 409
    assert answer(app, START) == (200, {"status": "started", "num_steps": 3})
    assert engine.profiled_steps == 3
    status, body = answer(app, START)
    assert (status, body["error"]["code"]) == (409, "profile_conflict")
    files = ["/srv/profiles/profile.html"]
    assert answer(app, STOP) == (200, {"status": "stopped", "steps": {"decode": 3}, "files": files})


@pytest.mark.parametrize(("given", "status"), [("1", 200), ("100", 200), ("0", 400), ("101", 400), ("x", 400),
                                               ("-1", 400), ("٣", 400), ("", 400), ("9" * 5000, 400)])  # fmt: skip
def test_number_of_steps_is_checked(given: str, status: int) -> None:
    engine = FakeEngine()
    found, body = answer(tiny_app(engine, profile_dir="/srv"), f"{START}?num_steps={given}")
    assert found == status and (status == 200 or body["error"]["param"] == "num_steps")


def test_an_engine_that_is_gone_is_503() -> None:
    engine = FakeEngine()
    engine.is_healthy = False
    assert answer(tiny_app(engine, profile_dir="/srv"), START)[0] == 503


def test_profiles_need_the_key() -> None:
    app = tiny_app(FakeEngine(), profile_dir="/srv", api_keys=("k",))
    assert answer(app, START)[0] == 401
    assert call(app, "POST", START, headers={"authorization": "Bearer k"}).status_code == 200

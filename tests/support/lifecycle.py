"""Waiting for a live server, shared by the tests of its start and its end."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import psutil

from tests.support.live import PATIENCE, LiveServer


def assert_gone(processes: list[psutil.Process]) -> None:
    assert processes
    assert not psutil.wait_procs(processes, PATIENCE)[1]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def wait_ready(live: LiveServer) -> None:
    deadline = time.monotonic() + PATIENCE
    while httpx.get(f"{live.url}/health/ready").status_code != 200:
        assert httpx.get(f"{live.url}/health/live").status_code == 200
        assert time.monotonic() < deadline
        time.sleep(0.05)

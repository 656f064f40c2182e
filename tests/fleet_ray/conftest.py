"""A local Ray with replicas of mock engines, for a module of tests; and live servers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from optkit.fleet.config import FleetConfig
from optkit.fleet.mock import MOCK_FACTORY, MockModel
from optkit.fleet.ray_local import LocalRay, set_environment

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0
set_environment()  # before a test module imports Ray


def mock_config(replicas: int, model: MockModel) -> FleetConfig:
    """A fleet of mock engines."""
    text = msgspec.json.encode(model).decode()
    return FleetConfig(artifact=text, replicas=replicas, cpus=1, factory=MOCK_FACTORY, drain_seconds=20.0)


@contextmanager
def local_ray(config: FleetConfig) -> Iterator[LocalRay]:
    """A running local Ray that starts the replicas of ``config``."""
    found = LocalRay(config)
    found.start()
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[FleetConfig]:
    """Two replicas of mock engines with a token each 10 ms."""
    config = mock_config(2, MockModel(step_seconds=0.01))
    with local_ray(config):
        yield config


@dataclass(frozen=True)
class Served:
    """A live server of this source tree."""

    url: str
    process: subprocess.Popen[str]

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)


@contextmanager
def command(*arguments: str, ready: str = " ready at ") -> Iterator[Served]:
    """``optkit`` with ``arguments`` until the line with the address; ended by SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "optkit.cli.main", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert ready in line, line
        yield Served(line.partition(ready)[2].split()[0], process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def children(pid: int) -> Sequence[int]:
    """All processes below ``pid``."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def until(condition: object, patience: float = PATIENCE) -> None:
    """Return when ``condition()`` holds."""
    end = time.monotonic() + patience
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)

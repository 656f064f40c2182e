"""A local Ray with replicas of fake engines, for a module of tests; and live servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from optkit.fleet.config import FleetConfig
from optkit.fleet.ray_local import LocalRay
from tests.support.engine_process import FACTORY
from tests.support.live import SCRIPT

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0
LIMITS = {"vocab_size": 512, "num_blocks": 512, "max_model_len": 512, "max_num_seqs": 8, "remember": False}


def fake_config(replicas: int, **options: object) -> FleetConfig:
    """A fleet of fake engines with ``options`` of ``tests.support.fakes.fake_engine``."""
    return FleetConfig(
        artifact=json.dumps(LIMITS | options), replicas=replicas, cpus=1, factory=FACTORY, drain_seconds=20.0
    )


@contextmanager
def local_ray(config: FleetConfig) -> Iterator[LocalRay]:
    """A running local Ray that starts the replicas of ``config``."""
    os.environ["PYTHONPATH"] = str(ROOT)  # workers import the fake engines
    found = LocalRay(config)
    found.start()
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[FleetConfig]:
    """Two replicas of fake engines, the second token of each answer 10 ms after the first."""
    config = fake_config(2)
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


__all__ = ["SCRIPT"]

"""When an engine is started again, and when no more."""

from __future__ import annotations

import math
import os

import pytest

from optkit.runtime.process import EngineClient
from optkit.serve import supervisor
from optkit.serve.supervisor import EngineSupervisor, cpu_seconds


def idle() -> EngineSupervisor:
    return EngineSupervisor(lambda: EngineClient("", factory="tests.fakes:fake_engine"))


def test_each_restart_waits_longer_and_the_fourth_death_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    watched = idle()
    assert [watched._next_delay() for _ in range(4)] == [0.0, 1.0, 2.0, None]
    now[0] += supervisor.WINDOW_SECONDS + 1
    assert watched._next_delay() == 0.0


def test_an_engine_that_never_started_is_not_restarting() -> None:
    watched = idle()
    assert not watched.is_healthy and not watched.is_restarting and not watched.gave_up


def test_processor_time_grows_with_work_and_is_unknown_of_nobody() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) <= before:
        sum(range(100_000))
    assert math.isnan(cpu_seconds(None))

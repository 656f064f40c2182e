"""Launching an engine process before it is needed."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from optkit.runtime.process.client import EngineClient
from optkit.runtime.process.launch import launch
from tests.support.engine_process import FACTORY, PATIENCE


def test_a_launched_worker_that_nobody_takes_is_killed() -> None:
    with launch(FACTORY) as launched:
        pid = launched.process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_launched_worker_is_taken_once() -> None:
    async def main() -> None:
        with launch(FACTORY) as launched:
            engine = EngineClient("", factory=FACTORY, launched=launched)
            await engine.start(PATIENCE)
            assert engine.pid == launched.process.pid
            with pytest.raises(RuntimeError, match="once"):
                launched.take()
        assert engine.is_healthy
        await engine.stop()

    asyncio.run(main())

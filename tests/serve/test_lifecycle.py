"""Start and end: ports, keys, signals, a dead engine. Time limits are only for hangs."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.lifecycle import wait_ready, wait_until
from tests.support.live import PATIENCE, LiveServer


def test_a_step_that_computes_for_long_changes_no_health_and_refuses_nobody(tmp_path: Path) -> None:
    """Silent for longer than a hung engine may be: it uses the processor."""
    end = tmp_path / "end"
    slow = {"slow_token": 299, "until": str(end), "silence_seconds": 0.5}
    with LiveServer(**slow) as live, ThreadPoolExecutor() as pool:
        [worker] = live.children()

        def complete(token: int) -> Future[httpx.Response]:
            body = {"prompt": [token], "max_tokens": 2}
            return pool.submit(httpx.post, f"{live.url}/v1/completions", json=body, timeout=PATIENCE)

        answers = [complete(299)]
        wait_until((tmp_path / "end.begun").exists)
        seen, began = set(), worker.cpu_times().user
        while worker.cpu_times().user < began + 3.0:  # silence, stillness and two looks of the supervisor
            seen |= {httpx.get(f"{live.url}{path}").status_code for path in HEALTH}
            time.sleep(0.1)
        answers.append(complete(20))
        time.sleep(0.2)
        end.touch()
        assert seen == {200}
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert live.children() == [worker]


HEALTH = ("/health", "/health/live", "/health/ready")


@pytest.mark.chaos
def test_silent_engine_is_ended_and_replaced() -> None:
    with LiveServer(silence_seconds=3) as live:
        [worker] = live.children()
        worker.suspend()
        deadline = time.monotonic() + PATIENCE
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        wait_ready(live)

"""The client's own load: lateness of a blocked loop, the CPU of a busy one."""

from __future__ import annotations

import asyncio
import time

from optkit.bench.client_load import ClientLoad, ClientMonitor


def watched(work: float, rest: float, times: int) -> ClientLoad:
    """The load of a loop that computes ``work`` seconds and sleeps ``rest`` seconds, again and again."""

    async def run() -> ClientLoad:
        async with ClientMonitor() as monitor:
            for _ in range(times):
                end = time.perf_counter() + work
                while time.perf_counter() < end:
                    pass
                await asyncio.sleep(rest)
        return monitor.measured()

    return asyncio.run(run())


def test_a_blocked_loop_is_late_and_busy() -> None:
    found = watched(0.05, 0.0, 6)
    assert found.lag_max_ms >= 30 and found.lag_p95_ms <= found.lag_max_ms
    assert found.warning(100.0) is not None


def test_a_resting_client_uses_less_than_a_busy_one() -> None:
    assert watched(0.0, 0.05, 4).cpu_share < watched(0.05, 0.0, 4).cpu_share


def test_warnings_compare_the_lag_with_the_first_token() -> None:
    assert ClientLoad(0.3, 1.9, 9.0).warning(10.0) is None
    assert "late" in str(ClientLoad(0.3, 6.0, 9.0).warning(100.0))
    assert ClientLoad(0.3, 6.0, 9.0).warning(200.0) is None
    assert "90%" in str(ClientLoad(0.9, 0.1, 0.1).warning(200.0))

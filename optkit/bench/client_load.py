"""The load generator's own load: a late client measures the client.

A task on the client's event loop sleeps for ``PERIOD`` again and again; the lateness of a wake-up is the
lateness of any event of a stream at the time. The CPU time of the process shows the distance of the single thread from
the limit.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from optkit.bench.records import clock

PERIOD = 0.01  # seconds
BUSY = 0.8  # of a core: the single loop saturates at 1
LATE = 0.05  # of the median TTFT
LEAST_LATE_MS = 2.0


@dataclass(frozen=True)
class ClientLoad:
    """The client during a turn.

    Attributes:
        cpu_share: CPU seconds of the client's process over seconds of the turn; 1 is a whole core.
        lag_p95_ms, lag_max_ms: lateness of the event loop.
    """

    cpu_share: float
    lag_p95_ms: float
    lag_max_ms: float

    def warning(self, ttft_ms: float | None) -> str | None:
        """The reason against the times of the turn; None for a client with time to spare."""
        if self.cpu_share > BUSY:
            return f"the client used {self.cpu_share:.0%} of a core: the load may be the client's limit"
        if self.lag_p95_ms > max(LEAST_LATE_MS, LATE * (ttft_ms or 0.0)):
            return f"the client read events up to {self.lag_p95_ms:.1f} ms late (p95): more cores, or fewer requests"
        return None


class ClientMonitor:
    """Watches the client while the body of ``async with`` runs."""

    async def __aenter__(self) -> ClientMonitor:
        self._lags: list[float] = []
        self._start, self._cpu = clock(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._seconds = max(clock() - self._start, 1e-9)
        self._cpu = time.process_time() - self._cpu
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def measured(self) -> ClientLoad:
        """The load during the body."""
        lags = np.array(self._lags or [0.0]) * 1e3
        return ClientLoad(self._cpu / self._seconds, float(np.percentile(lags, 95)), float(lags.max()))

    async def _watch(self) -> None:
        while True:
            due = clock() + PERIOD
            await asyncio.sleep(PERIOD)
            self._lags.append(max(0.0, clock() - due))

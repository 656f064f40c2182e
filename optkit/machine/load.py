"""The load of the machine: work of all processes on its processors."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.25  # of the processors: more in use spoils a measurement
SAMPLE_SECONDS = 0.5
PROC_STAT = Path("/proc/stat")


def load_average() -> float:
    """The 1-minute load average."""
    return os.getloadavg()[0]


def cpu_in_use(seconds: float = SAMPLE_SECONDS) -> float | None:
    """The share of the processors' time that all processes take during the next ``seconds``; None but on Linux.

    The caller sleeps meanwhile. A load average of a minute still counts what ended long ago, as the command before.
    """
    if (before := _ticks()) is None:
        return None
    time.sleep(seconds)
    after = _ticks()
    if after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def disturbance() -> float:
    """``cpu_in_use`` of a machine that is about to be measured, where it is more than ``BUSY``; else 0."""
    used = cpu_in_use() or 0.0
    return used if used > BUSY else 0.0


def _ticks() -> tuple[int, int] | None:
    """The clock ticks of all processors in use, and in total, since the start of the system."""
    try:
        line = PROC_STAT.read_text("utf-8").partition("\n")[0]
        user, nice, system, idle, iowait, *others = map(int, line.split()[1:9])
    except (OSError, ValueError):
        return None
    used = user + nice + system + sum(others)
    return used, used + idle + iowait

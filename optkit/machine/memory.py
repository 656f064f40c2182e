"""Memory of the machine that programs can still take."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes of memory that are free, or can be freed without swapping, within the limit of the container.

    Systems other than Linux do not tell; there it is half of the memory.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit = _cgroup_bytes(cgroup)
    return free if limit is None else min(free, limit)


def _cgroup_bytes(cgroup: Path) -> int | None:
    """Bytes left below the limit of the control group (version 2); None without a limit."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"])  # freed before any process is killed
    except (OSError, KeyError, ValueError):
        return None
    return max(0, limit - used + cached)

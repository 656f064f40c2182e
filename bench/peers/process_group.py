"""What the kernel knows of a server's process group: peak memory; and stopping it while it is not its turn.

All servers stay up so that rounds can interleave, but engines differ in how quietly they idle: thread pools spin,
engine loops poll. So whoever is not being measured is frozen with SIGSTOP, engine processes and all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path


def members(group: int, proc: Path = Path("/proc")) -> Iterator[Path]:
    """/proc entries of the processes in a group."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and _group_of(entry) == group:
            yield entry


def _group_of(entry: Path) -> int | None:
    """The process group; None if the process has ended. (A name may hold spaces and brackets: read after it.)"""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError, ValueError):
        return None


def peak_memory(group: int, proc: Path = Path("/proc")) -> int:
    """Bytes: the sum of each living process's own peak resident size (VmHWM).

    The kernel keeps the peaks, so nothing samples while a server works. Pages that two processes share count
    twice, mapped files count as far as they were read, and children that have ended are not seen.
    """
    return sum(_high_water(entry) for entry in members(group, proc))


def _high_water(entry: Path) -> int:
    try:
        lines = (entry / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def freeze(group: int) -> None:
    os.killpg(group, signal.SIGSTOP)


def thaw(group: int) -> None:
    os.killpg(group, signal.SIGCONT)

"""Peak memory and use of AVX-512 of a server's process group, and freezing a server outside its turn.

All servers stay up because rounds interleave. But engines differ while idle: thread pools spin, engine loops poll. So
all servers but the measured server are frozen with SIGSTOP, engine processes included.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def members(group: int, proc: Path = Path("/proc")) -> Iterator[Path]:
    """/proc entries of the processes in a group."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and _group_of(entry) == group:
            yield entry


def _group_of(entry: Path) -> int | None:
    """The process group; None for an ended process.

    The field is read after the closing bracket of the name, since a name may hold spaces and brackets.
    """
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError, ValueError):
        return None


def peak_memory(group: int, proc: Path = Path("/proc")) -> int:
    """Bytes: the sum of each living process's own peak resident size (VmHWM).

    The kernel keeps the peaks, so no sampling disturbs the server. Pages shared by two processes count twice, mapped
    files count only the pages read, and ended children do not count.
    """
    return sum(_high_water(entry) for entry in members(group, proc))


def _high_water(entry: Path) -> int:
    try:
        lines = (entry / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def used_avx512(group: int, seconds: float, proc: Path = Path("/proc")) -> bool | None:
    """True when a thread of the group had AVX-512 registers in use within the last ``seconds``.

    The kernel looks at each switch of threads (``arch_status``, "AVX512_elapsed_ms"; -1 for never). The time is
    inherited from the parent process, so a window is needed. None where the kernel keeps no such record.
    """
    elapsed = [ms for entry in members(group, proc) for ms in _avx512_elapsed(entry)]
    return any(0 <= ms < 1e3 * seconds for ms in elapsed) if elapsed else None


def _avx512_elapsed(entry: Path) -> Iterator[int]:
    """Milliseconds since the last use of AVX-512 of each thread of a process."""
    for file in entry.glob("task/*/arch_status"):
        with suppress(OSError):  # an ended thread
            for line in file.read_text().splitlines():
                if line.startswith("AVX512_elapsed_ms:"):
                    yield int(line.split()[1])


def freeze(group: int) -> None:
    os.killpg(group, signal.SIGSTOP)


def thaw(group: int) -> None:
    os.killpg(group, signal.SIGCONT)

"""The heap gives freed memory back, or keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optkit.machine.heap import trim_heap

SIZE, COUNT = 64 << 10, 1 << 10  # below the size from which glibc maps memory of its own


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_trim_heap_releases_pages_below_memory_in_use() -> None:
    blocks = [bytearray(b"x" * SIZE) for _ in range(COUNT)]
    last = blocks.pop()
    held = resident_bytes()
    del blocks
    trim_heap()
    assert held - resident_bytes() > SIZE * COUNT // 2 and len(last) == SIZE


FAULTS = """
import resource
from optkit.machine.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytearray(10_000_000)[::4096] = bytes(2442)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
keep_freed_memory()
faults()
print(plain, faults())
"""


def faults(**settings: str) -> tuple[int, int]:
    """Page faults of the same allocations before and after ``keep_freed_memory``, with ``settings`` of malloc."""
    around = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=around | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    plain, kept = map(int, done.stdout.split())
    if plain < 2000:
        pytest.skip("the C library keeps its memory anyway")
    return plain, kept


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_kept_memory_has_its_pages_already() -> None:
    plain, kept = faults()
    assert kept < plain // 10


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_settings_of_the_user_stay() -> None:
    plain, kept = faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert kept > plain // 2

"""The heap gives freed memory back, or keeps it."""

from __future__ import annotations

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


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_kept_memory_has_its_pages_already() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60
    )
    plain, kept = map(int, done.stdout.split())
    if plain < 2000:
        pytest.skip("the C library keeps its memory anyway")
    assert kept < plain // 10

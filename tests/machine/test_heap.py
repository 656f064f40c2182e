"""The heap gives freed memory back."""

from __future__ import annotations

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

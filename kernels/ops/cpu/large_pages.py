"""Memory in large pages, which the system is asked for (Linux, ``MADV_HUGEPAGE``).

A decode step reads every weight once, so a page of 4 KiB costs a miss of the translation buffer, which a virtual
machine pays twice. Pages that were never written take no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache

import numpy as np

LARGE_PAGE = 2 << 20  # bytes


@cache
def has_large_pages() -> bool:
    """False without large pages on demand, and under AddressSanitizer, which sees no borders inside of a chunk."""
    return hasattr(mmap, "MADV_HUGEPAGE") and not hasattr(ctypes.CDLL(None), "__asan_init")


def new_chunk(num_bytes: int) -> np.ndarray:
    """At least ``num_bytes`` of zeros, uint8, from the border of a large page on."""
    size = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if has_large_pages():
        with contextlib.suppress(OSError):  # a system without them: pages of the usual size
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % LARGE_PAGE
    return whole[start : start + size]

"""Keep large temporaries: tell glibc's malloc not to hand activation buffers back after every op.

A [512, 3072] float32 activation is above malloc's mmap threshold, so by default every op maps fresh zero pages and
unmaps them again; the page faults cost more than the op. With high thresholds freed buffers stay in the process
and are reused. The trade-off is resident memory: the peak of a step is kept until exit.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEEP_BYTES = 1 << 25  # the largest mmap threshold glibc accepts


def keep_buffers() -> bool:
    """Raise malloc's thresholds for this process; False where the C library has no ``mallopt`` (not glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    results = [mallopt(option, KEEP_BYTES) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)]
    return all(result == 1 for result in results)

"""The heap of the C library: freed memory goes back to the system after loading, and stays in the process afterwards.

Loading a model or a tokenizer frees as much memory as stays in use. glibc would hold the freed pages.

A step of a model by PyTorch allocates an activation of some MB for each op. By default glibc maps new pages for each,
and unmaps the pages when the tensor is freed: a fifth of a prompt of 512 tokens (docs/lab-notes.md).
"""

from __future__ import annotations

import ctypes
import gc
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGEST_KEPT = 32 << 20  # bytes of an allocation; glibc accepts no more on 64 bits
MOST_KEPT = 1 << 30  # bytes at the end of the heap
TUNABLES = "GLIBC_TUNABLES"


def trim_heap() -> None:
    """Return freed memory to the system; nothing happens with a C library other than glibc."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep freed memory for later allocations, in all threads, until the process ends: for processes of optkit's own.

    The process keeps what allocations of up to ``LARGEST_KEPT`` bytes took at most at once. Nothing happens with a C
    library other than glibc, or where the environment has settings of malloc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(
        name.startswith("MALLOC_") or name == TUNABLES for name in os.environ
    ):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)

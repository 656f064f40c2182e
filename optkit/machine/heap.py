"""The heap of the C library: freed memory goes back to the system.

Loading a model or a tokenizer frees as much memory as it keeps. glibc would hold the freed pages for later requests.
"""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Return freed memory to the system; nothing happens with a C library other than glibc."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

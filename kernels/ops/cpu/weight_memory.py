"""Memory of packed weights: large pages, one weight after the other.

A decode step reads every weight once, so a page of 4 KiB costs a miss of the translation buffer, which a virtual
machine pays twice. Weights therefore share chunks, for which the system is asked for pages of 2 MiB (Linux,
``MADV_HUGEPAGE``). Pages of a chunk that were never written take no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from optkit.kernels.cpu.program import ALIGN

LARGE_PAGE = 2 << 20  # bytes
CHUNK = 8 * LARGE_PAGE


class WeightMemory:
    """Chunks of memory, filled in the order of the calls. A chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self.chunk, self.free = torch.empty(0, dtype=torch.uint8), 0
        self.lock = threading.Lock()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros of ``shape``, contiguous, on a cache line."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0 or not has_large_pages():
            return torch.zeros(*shape, dtype=dtype)
        with self.lock:
            if num_bytes > self.chunk.numel() - self.free:
                self.chunk, self.free = new_chunk(max(CHUNK, num_bytes)), 0
            part = self.chunk[self.free : self.free + num_bytes]
            self.free += -(-num_bytes // ALIGN) * ALIGN
        return part.view(dtype).view(*shape)


@cache
def has_large_pages() -> bool:
    """False without large pages on demand, and under AddressSanitizer, which sees no borders inside of a chunk."""
    return hasattr(mmap, "MADV_HUGEPAGE") and not hasattr(ctypes.CDLL(None), "__asan_init")


def new_chunk(num_bytes: int) -> Tensor:
    """At least ``num_bytes`` of zeros, uint8, from the border of a large page on."""
    size = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them: pages of the usual size
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + size]


_memory = WeightMemory()


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape`` for a packed weight, contiguous, in the memory of all packed weights."""
    return _memory.zeros(shape, dtype)

"""Bytes of tensors read by the own process, from the processor's record: the accessed bits of memory pages (Linux).

The kernel clears the bits on a write to /proc/self/clear_refs, and /proc/self/smaps counts the pages with a set bit of
each mapping (``Referenced``). A page counts whole, so the figure is exact up to a page at each end of a tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

PAGE = mmap.PAGESIZE
THP_DISABLE = 41  # PR_SET_THP_DISABLE
DO_NOT_DUMP = 16  # MADV_DONTDUMP
CLEAR, MAPPINGS = Path("/proc/self/clear_refs"), Path("/proc/self/smaps")


def is_available() -> bool:
    """True where the kernel has accessed bits."""
    return sys.platform == "linux" and CLEAR.exists() and MAPPINGS.exists()


def small_pages() -> None:
    """Give memory mapped from now on pages of the usual size; a bit of a large page says little.

    Raises:
        OSError: the system refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(THP_DISABLE, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE)")


class Watched:
    """The whole pages within ``tensors``, as mappings of their own.

    Raises:
        OSError: the system refuses.
        RuntimeError: a tensor is in large pages (``small_pages`` was not called before).
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.ranges = joined(whole_pages(tensor) for tensor in tensors)
        self._call("madvise", DO_NOT_DUMP)  # a flag that the neighbours do not have parts the mapping
        if self._sum("AnonHugePages"):
            raise RuntimeError("a watched tensor is in large pages")
        if self._sum("Size") != self.num_bytes:
            raise RuntimeError("the system did not part the mappings")

    def clear(self) -> None:
        """Forget what was read so far.

        A page whose translation a core still has gets no new bit, and the system leaves translations of cleared pages
        where they are. A change of protection, and back, takes them away.

        Raises:
            OSError: the system refuses.
        """
        CLEAR.write_text("1")
        self._call("mprotect", mmap.PROT_READ)
        self._call("mprotect", mmap.PROT_READ | mmap.PROT_WRITE)

    def accessed(self) -> int:
        """Bytes of the pages read since ``clear``."""
        return self._sum("Referenced")

    @property
    def num_bytes(self) -> int:
        """Bytes of all watched pages."""
        return sum(end - start for start, end in self.ranges)

    def _call(self, name: str, argument: int) -> None:
        """Call ``name`` of the C library, with ``argument``, on each range."""
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in self.ranges:
            if function(start, end - start, argument):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _sum(self, field: str) -> int:
        return sum(
            size
            for start, end, size in mappings(field)
            if any(first <= start and end <= last for first, last in self.ranges)
        )


def whole_pages(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first page border in ``tensor`` to the last."""
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.itemsize
    return -(-start // PAGE) * PAGE, end // PAGE * PAGE


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """``ranges`` in order, neighbours joined, as the system joins equal mappings."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def mappings(field: str) -> Iterator[tuple[int, int, int]]:
    """First address, end and the bytes in ``field`` of each mapping of the process."""
    start = end = 0
    for line in MAPPINGS.read_text("utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(number, 16) for number in name.split("-"))
        elif name == f"{field}:":
            yield start, end, 1024 * int(rest.split()[0])

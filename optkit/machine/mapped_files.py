"""Memory of mapped files: what was read once, to be packed, need not stay resident.

A safetensors file is mapped whole, and its pages stay in memory while one tensor of it lives, which the embedding's
does. Weights that are packed at load are read from there exactly once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # <sys/mman.h>
MAPS = Path("/proc/self/maps")


def drop_mapped_pages(directory: Path) -> None:
    """Let go of the resident pages of mapped tensor files in ``directory``; they are read again when touched (Linux).

    Only for files whose tensors nobody writes to: a page that was written would come back as it is on disk.
    """
    ranges = list(mapped_files(directory))
    libc = ctypes.CDLL(None) if ranges else None
    for start, end in ranges:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)  # type: ignore[union-attr]


def mapped_files(directory: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of this process that map tensor files below ``directory``."""
    inside = f"{directory.resolve()}/"
    for line in MAPS.read_text().splitlines() if MAPS.is_file() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(inside) and fields[5].endswith(".safetensors"):
            start, end = fields[0].split("-")
            yield int(start, 16), int(end, 16)

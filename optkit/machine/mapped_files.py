"""Memory of mapped tensor files: release pages while weights are packed.

A safetensors file is mapped as a whole. All pages once read stay in memory while any tensor of the file lives, for
example the embedding. Weights packed at load are read exactly once.

The kernel maps the pages around a read page, too. So a small tensor, read in every step, is copied: otherwise its
neighbours in the file would stay in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # <sys/mman.h>
MAPS = Path("/proc/self/maps")
DELETED = " (deleted)"  # of a file without a name, in the list of mappings
RELEASE_BYTES = 16 << 20  # of weights read between two releases, each of which takes milliseconds


class PageRelease:
    """Releases the pages of mapped tensor files in ``directory`` after every ``RELEASE_BYTES`` of read weights.

    A call reports a number of bytes as read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.read = directory, 0

    def __call__(self, num_bytes: int) -> None:
        self.read += num_bytes
        if self.read >= RELEASE_BYTES:
            drop_mapped_pages(self.directory)
            self.read = 0


def drop_mapped_pages(directory: Path) -> None:
    """Release the resident pages of mapped tensor files in ``directory`` (Linux). A later access reads the file again.

    Only for tensors nobody writes to: a changed page would return with the content of the disk.
    """
    ranges = list(mapped_files(directory))
    libc = ctypes.CDLL(None) if ranges else None
    for start, end in ranges:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)  # type: ignore[union-attr]


def mapped_files(directory: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of the mapped tensor files below ``directory`` in the running process."""
    inside = f"{directory.resolve()}/"
    for line in MAPS.read_text().splitlines() if MAPS.is_file() else ():
        fields = line.removesuffix(DELETED).split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(inside) and fields[5].endswith(".safetensors"):
            start, end = fields[0].split("-")
            yield int(start, 16), int(end, 16)

"""Ranks that are processes of one machine, on CPUs: collectives through shared memory (collectives.cpp).

``SharedRegion`` is the memory, made by one process and mapped by all; ``SharedRank`` is the communicator of a rank over
the region.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.errors import CollectiveFailed
from optkit.kernels.collectives import REDUCTIONS, WAIT_SECONDS
from optkit.kernels.cpu import native

SPIN_SECONDS = 200e-6  # of a wait, where each rank has a core: ranks that share layers meet again within one
SHORT_SPIN_SECONDS = 5e-6  # with fewer cores than threads: the core is for the rank that is waited for
INTEGER = torch.int32


class SharedRegion:
    """Zeroed memory for the collectives of ``size`` ranks, behind the file descriptor ``fd``.

    Args:
        fd: the descriptor of an existing region, which the object then owns; None makes a new region.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size, self.num_bytes = size, int(native.library().optkit_region_bytes(size))
        self.fd = new_file(self.num_bytes) if fd is None else fd
        self.memory = mmap.mmap(self.fd, self.num_bytes)
        self.view = torch.frombuffer(self.memory, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.view.data_ptr()


def new_file(num_bytes: int) -> int:
    """The descriptor of a file of zeros in memory, or without a name on disk where the system has no such files."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("optkit-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


class SharedRank:
    """The communicator of ``rank`` over ``region``. One thread at a time may use it.

    Args:
        spin: seconds that a wait spins before it sleeps; None chooses by the number of cores.
        timeout: seconds after which a wait for another rank fails.
    """

    def __init__(
        self,
        region: SharedRegion,
        rank: int,
        spin: float | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> None:
        self.region, self.rank, self.size = region, rank, region.size
        spin = spin_seconds(region.size) if spin is None else spin
        self.handle = int(
            native.library().optkit_join(region.address, rank, self.size, int(spin * 1e9), int(timeout * 1e9))
        )
        self._sizes: dict[tuple[int, ...], Tensor] = {}

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            native.library().optkit_leave(handle)

    @property
    def has_failed(self) -> bool:
        """True after a wait that failed: the ranks are out of step for good."""
        return bool(native.library().optkit_has_failed(self.handle))

    def fail(self) -> None:
        """Let this rank's waits fail, now and later, because another rank is gone. From any thread."""
        native.library().optkit_fail(self.handle)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See ``Communicator.all_reduce``."""
        x, library = x.contiguous(), native.library()
        native.require(x.dtype in (torch.float32, INTEGER), "ranks add float32 or int32")
        out = torch.empty_like(x)
        reduce = library.optkit_all_reduce_int if x.dtype is INTEGER else library.optkit_all_reduce
        largest = REDUCTIONS.index(op)
        check(
            reduce(self.handle, x.data_ptr(), out.data_ptr(), 1, x.numel(), largest, native.threads()), self
        )
        return out

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See ``Communicator.all_gather``."""
        *rows, columns = x.shape
        x, library, total = x.contiguous().view(math.prod(rows), columns), native.library(), sum(sizes)
        native.require(x.dtype in (torch.float32, torch.uint8), "ranks share float32 or uint8")
        native.require(
            len(sizes) == self.size and sizes[self.rank] <= columns, "a share larger than the tensor"
        )
        out = torch.empty((len(x), total), dtype=x.dtype)
        gather = library.optkit_all_gather if x.dtype is torch.float32 else library.optkit_all_gather_codes
        given = self.sizes(sizes).data_ptr()
        check(
            gather(
                self.handle, x.data_ptr(), columns, given, out.data_ptr(), len(x), total, native.threads()
            ),
            self,
        )
        return out.view(*rows, total)

    def sizes(self, sizes: Sequence[int]) -> Tensor:
        """``sizes`` as a tensor [ranks] int64 that lives as long as the communicator."""
        key = tuple(sizes)
        if key not in self._sizes:
            self._sizes[key] = torch.tensor(key, dtype=torch.int64)
        return self._sizes[key]


def check(failed: int, rank: SharedRank) -> None:
    """Raise CollectiveFailed where a native collective has failed."""
    if failed:
        raise CollectiveFailed(f"a rank of {rank.size} did not answer rank {rank.rank}")


def spin_seconds(size: int) -> float:
    """The spinning of a wait: short where ``size`` ranks with their threads need more cores than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SPIN_SECONDS if size * native.threads() <= cores else SHORT_SPIN_SECONDS

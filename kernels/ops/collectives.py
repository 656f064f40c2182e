"""Communicators: the exchange of tensors between the ranks of a model.

A rank is a process, or in checks a thread, with a part of every large weight (tensor parallel) or with some of the
layers (pipeline parallel). All ranks run the same collective calls in the same order. ``current`` is the communicator
of the running code, set by ``using``; the ops of graphs (``reference_collectives``) find it there.

- ``Threads``: ranks are threads of this process, for checks. Sums are in the order of the ranks.
- ``optkit.kernels.cpu.shared_memory``: ranks are processes on one machine's CPUs.
- ``optkit.kernels.distributed``: ``torch.distributed``, gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from optkit.errors import CollectiveFailed

REDUCTIONS = ("sum", "max")
# Of a wait for another rank: above the longest step of a stage. The end of a process is noticed by its parent at once.
WAIT_SECONDS = 3600.0


class Communicator(Protocol):
    """The exchange of one rank with the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """The sum or the largest of all ranks' ``x``, float32 or int32, element by element, as a new tensor."""
        ...

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The first ``sizes[r]`` columns of rank r's ``x`` [..., columns], side by side in the order of the ranks."""
        ...


_current: ContextVar[Communicator | None] = ContextVar("communicator", default=None)


@contextmanager
def using(communicator: Communicator) -> Iterator[None]:
    """Make ``communicator`` the current one in the body."""
    token = _current.set(communicator)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Communicator:
    """The communicator of the running code.

    Raises:
        RuntimeError: none is set: a rank's graph runs without the other ranks.
    """
    found = _current.get()
    if found is None:
        raise RuntimeError("the graph of a rank needs the communicator of its ranks")
    return found


def borders(total: int, unit: int, size: int) -> list[int]:
    """The first element of each of ``size`` ranks' shares of ``total``, and ``total``: [size + 1].

    Shares are whole units and differ by one unit at most.
    """
    units = total // unit
    return [*(units * rank // size * unit for rank in range(size)), total]


def shares(total: int, unit: int, size: int) -> list[int]:
    """The number of elements of each rank's share."""
    edges = borders(total, unit, size)
    return [stop - start for start, stop in itertools.pairwise(edges)]


def broadcast_sizes(width: int, source: int, size: int) -> list[int]:
    """The number of elements of each of ``size`` ranks where ``source`` gives all ``width``."""
    return [width * (rank == source) for rank in range(size)]


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """The sum or the largest of ``tensors``, in order, as a new tensor."""
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        if op == "sum":
            total += tensor
        else:
            torch.maximum(total, tensor, out=total)
    return total


class Threads:
    """``size`` ranks that are threads of this process. ``ranks`` has the communicator of each.

    ``timeout`` is in seconds: a rank waits for the others so long, then all fail.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.ranks = tuple(ThreadRank(self, rank) for rank in range(size))

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks; ``leave`` must follow when they were read.

        Raises:
            CollectiveFailed: another rank failed or is late.
        """
        self.given[rank] = x
        self.leave()
        return list(self.given)

    def leave(self) -> None:
        """Wait for all ranks."""
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveFailed("another rank failed") from None

    def abort(self) -> None:
        """End the waiting of all ranks, after one has failed."""
        self.barrier.abort()


class ThreadRank:
    """A rank of ``Threads``."""

    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank = group, rank

    @property
    def size(self) -> int:
        return len(self.group.given)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See ``Communicator.all_reduce``."""
        result = reduced(self.group.exchange(self.rank, x), op)
        self.group.leave()
        return result

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See ``Communicator.all_gather``."""
        given = self.group.exchange(self.rank, x)
        result = torch.cat([part[..., :size] for part, size in zip(given, sizes, strict=True)], dim=-1)
        self.group.leave()
        return result

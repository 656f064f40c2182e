"""Ranks by ``torch.distributed``: gloo between CPUs, where the native kernels are missing, and NCCL between GPUs.

NCCL was not run: it needs a GPU for each rank. Tests run both exchanges by gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from optkit.kernels.collectives import WAIT_SECONDS, reduced

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class DistributedRank:
    """The communicator of a process of ``group``. Sums of floats are in the order of the ranks on CPUs, not on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See ``Communicator.all_reduce``."""
        if x.device.type == "cpu" and x.is_floating_point() and op == "sum":
            return reduced(self.gathered(x.contiguous()), op)
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, OPERATIONS[op], group=self.group)
        return out

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See ``Communicator.all_gather``."""
        widest, own = max(sizes), sizes[self.rank]
        given = x.new_zeros((*x.shape[:-1], widest))  # all ranks give tensors of one shape
        given[..., :own] = x[..., :own]
        return torch.cat([part[..., :s] for part, s in zip(self.gathered(given), sizes, strict=True)], dim=-1)

    def gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts


def join(backend: str, file: str, rank: int, size: int) -> DistributedRank:
    """The communicator of ``rank``; the ranks meet in ``file``, which is empty and writable for all of them."""
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has no process group")
    return DistributedRank(group)

"""Ranks as threads: results in order, and the first real error."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels.collectives import current
from optkit.parallel.in_threads import in_threads


def test_ranks_exchange_and_return_in_order() -> None:
    def work(rank: int) -> float:
        assert current().rank == rank and current().size == 3
        return float(current().all_reduce(torch.tensor([rank + 1.0]), "sum")) * 10 + rank

    assert in_threads(work, 3) == [60.0, 61.0, 62.0]


def test_the_error_is_that_of_the_rank_that_failed_and_nobody_waits() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("mine")
        current().all_reduce(torch.ones(1), "sum")

    with pytest.raises(ValueError, match="mine"):
        in_threads(work, 3)

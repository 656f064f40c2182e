"""Collectives through shared memory: against sums in rank order and gloo, in threads and processes, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.errors import CollectiveFailed
from optkit.kernels.collectives import reduced, shares
from optkit.kernels.cpu import native
from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion

pytestmark = pytest.mark.skipif(not native.available(), reason="native kernels are missing")


def in_ranks(size: int, work: Callable[[SharedRank], Any], timeout: float = 60.0) -> list[Any]:
    """The results of ``work`` of all ranks, in threads."""
    region = SharedRegion(size)
    ranks = [SharedRank(region, rank, spin=20e-6, timeout=timeout) for rank in range(size)]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ranks[rank])
        except CollectiveFailed as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    if dtype is torch.float32:
        return torch.randn(count, generator=generator) * 10 ** (rank - 1)
    return torch.randint(-(2**29), 2**29, (count,), generator=generator, dtype=dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 7, 576, 8191, 8193, 131_072, 300_001])
def test_sums_are_those_of_a_loop_over_ranks_to_the_bit(size: int, count: int) -> None:
    given = [numbers(rank, count) for rank in range(size)]
    for op in ("sum", "max"):
        for found in in_ranks(size, lambda rank, op=op: rank.all_reduce(given[rank.rank], op)):
            assert torch.equal(found, reduced(given, op))


@pytest.mark.parametrize("count", [5, 40_000])
def test_integers_are_added_exactly(count: int) -> None:
    given = [numbers(rank, count, torch.int32) for rank in range(3)]
    expected = sum(each.to(torch.int64) for each in given).to(torch.int32)
    for found in in_ranks(3, lambda rank: rank.all_reduce(given[rank.rank], "sum")):
        assert torch.equal(found, expected)


def test_nan_is_the_largest_in_every_rank() -> None:
    given = [torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([float("nan"), 3.0, 1.0])]
    for found in in_ranks(2, lambda rank: rank.all_reduce(given[rank.rank], "max")):
        assert found[:2].isnan().all() and found[2] == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(("rows", "total", "unit"), [(1, 10, 1), (5, 97, 1), (3, 96, 32), (2, 700_001, 1)])
def test_gathered_columns_are_those_of_the_whole(
    dtype: torch.dtype, rows: int, total: int, unit: int
) -> None:
    whole = torch.randint(0, 256, (rows, total), generator=torch.Generator().manual_seed(total)).to(dtype)
    sizes = shares(total, unit, 3)
    parts = whole.split(sizes, dim=1)

    def work(rank: SharedRank) -> Tensor:
        wide = torch.cat([parts[rank.rank], torch.ones(rows, 1, dtype=dtype)], dim=1)  # one column too many
        return rank.all_gather(wide, sizes)

    for found in in_ranks(3, work):
        assert torch.equal(found, whole)


def test_thousands_of_unlike_rounds_stay_in_step() -> None:
    lengths = [1, 576, 20_000, 3, 140_000, 49_152] * 60
    totals = [reduced([numbers(rank, n) for rank in range(3)], "sum") for n in lengths[:6]]

    def work(rank: SharedRank) -> bool:
        given = [numbers(rank.rank, n) for n in lengths[:6]]
        return all(
            torch.equal(rank.all_reduce(given[i % 6], "sum"), totals[i % 6]) for i in range(len(lengths))
        )

    assert in_ranks(3, work) == [True] * 3


def test_a_late_rank_fails_the_others_and_they_stay_failed() -> None:
    def work(rank: SharedRank) -> bool:
        if rank.rank == 1:
            return True
        with pytest.raises(CollectiveFailed, match="did not answer rank 0"):
            rank.all_reduce(torch.ones(3), "sum")
        with pytest.raises(CollectiveFailed):
            rank.all_reduce(torch.ones(3), "sum")
        return rank.has_failed

    assert in_ranks(2, work, timeout=0.1) == [True, True]


def test_a_wait_ends_when_the_other_rank_is_known_to_be_gone() -> None:
    region = SharedRegion(2)
    rank = SharedRank(region, 0)
    timer = threading.Timer(0.2, rank.fail)
    timer.start()
    with pytest.raises(CollectiveFailed):
        rank.all_reduce(torch.ones(3), "sum")
    timer.join()

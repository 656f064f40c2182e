"""Accessed bits count the pages that were read, and no others."""

from __future__ import annotations

import mmap

import pytest
import torch

from bench.models import accessed
from bench.models.accessed import PAGE, Watched

pytestmark = pytest.mark.skipif(not accessed.is_available(), reason="this system has no accessed bits")


def written(pages: int) -> torch.Tensor:
    memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def test_pages_that_were_read_are_counted() -> None:
    tensor, other = written(64), written(8)
    watched = Watched([tensor])
    watched.clear()
    assert watched.accessed() == 0
    int(tensor[10 * PAGE : 22 * PAGE].sum()), int(other.sum())
    assert watched.accessed() == 12 * PAGE and watched.num_bytes == 64 * PAGE
    watched.clear()
    assert watched.accessed() == 0


def test_pages_read_just_before_are_counted_again() -> None:
    """Another core may still know where such pages are, and then sets no bit by itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    tensor = written(512).view(torch.float32)
    watched, found = Watched([tensor]), []
    for _ in range(8):
        tensor.sum()
        watched.clear()
        tensor.sum()
        found.append(watched.accessed())
    torch.set_num_threads(threads)
    assert found == [512 * PAGE] * 8


def test_only_whole_pages_of_a_tensor_are_watched() -> None:
    tensor = written(16)
    watched = Watched([tensor[100 : 5 * PAGE + 7]])
    assert watched.num_bytes == 4 * PAGE
    watched.clear()
    int(tensor.sum())
    assert watched.accessed() == 4 * PAGE


def test_neighbours_are_one_mapping() -> None:
    tensor = written(16)
    watched = Watched([tensor[: 4 * PAGE], tensor[4 * PAGE : 8 * PAGE], tensor[100:200]])
    watched.clear()
    int(tensor[2 * PAGE : 6 * PAGE].sum())
    assert watched.accessed() == 4 * PAGE and watched.num_bytes == 8 * PAGE

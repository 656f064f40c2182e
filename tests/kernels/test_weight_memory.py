"""Memory of packed weights."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from optkit.kernels.cpu import weight_memory
from optkit.kernels.cpu.call_list import ALIGN
from optkit.kernels.cpu.weight_memory import CHUNK, LARGE_PAGE, WeightMemory

pytestmark = pytest.mark.skipif(
    not weight_memory.has_large_pages(), reason="a system without large pages on demand, or AddressSanitizer"
)


def test_zeros_are_dense_and_do_not_overlap_when_a_chunk_is_shared() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1,), (64, 64), (7, 2, 9)]
    tensors = [memory.zeros(shape, torch.float32) for shape in shapes]
    for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGN == 0
        assert not tensor.any()
        tensor.fill_(index + 1)
    for index, tensor in enumerate(tensors):
        assert tensor.eq(index + 1).all()


def test_a_chunk_starts_on_a_large_page_when_it_is_new() -> None:
    first = WeightMemory().zeros((100,), torch.uint8)
    assert first.data_ptr() % LARGE_PAGE == 0


def test_a_weight_gets_a_chunk_of_its_own_when_it_is_larger_than_one() -> None:
    memory = WeightMemory()
    large = memory.zeros((CHUNK + 1,), torch.uint8)
    after = memory.zeros((10,), torch.uint8)
    large.fill_(1)
    assert large.numel() == CHUNK + 1
    assert not after.any()


def test_zeros_have_no_memory_when_the_shape_is_empty() -> None:
    assert WeightMemory().zeros((0, 4), torch.float16).shape == (0, 4)


def test_a_chunk_is_unmapped_when_its_last_tensor_dies() -> None:
    memory = WeightMemory()
    address = memory.zeros((8,), torch.uint8).data_ptr()
    assert is_mapped(address)
    memory.chunk = torch.empty(0, dtype=torch.uint8)
    assert not is_mapped(address)


def test_zeros_are_there_when_the_system_refuses_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert not WeightMemory().zeros((4,), torch.int8).any()


def is_mapped(address: int) -> bool:
    """True where ``address`` lies in a mapping of a chunk's size: a smaller one may take its place."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end and end - start >= CHUNK:
            return True
    return False

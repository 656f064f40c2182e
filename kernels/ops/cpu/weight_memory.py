"""Memory of packed weights: large pages (``optkit.kernels.cpu.large_pages``), one weight after the other in chunks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.kernels.cpu.call_list import ALIGN
from optkit.kernels.cpu.large_pages import LARGE_PAGE, has_large_pages, new_chunk

CHUNK = 8 * LARGE_PAGE


class WeightMemory:
    """Chunks of memory, filled in the order of the calls. A chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self.chunk, self.free = torch.empty(0, dtype=torch.uint8), 0
        self.lock = threading.Lock()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros of ``shape``, contiguous, on a cache line."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0 or not has_large_pages():
            return torch.zeros(*shape, dtype=dtype)
        with self.lock:
            if num_bytes > self.chunk.numel() - self.free:
                self.chunk, self.free = torch.from_numpy(new_chunk(max(CHUNK, num_bytes))), 0
            part = self.chunk[self.free : self.free + num_bytes]
            self.free += -(-num_bytes // ALIGN) * ALIGN
        return part.view(dtype).view(*shape)


_memory = WeightMemory()


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of ``shape`` for a packed weight, contiguous, in the memory of all packed weights."""
    return _memory.zeros(shape, dtype)

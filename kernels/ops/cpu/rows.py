"""Float32 rows for the native pointwise kernels.

Rows of neighbouring elements are read in place, at any distance from each other; other layouts are copied first.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32, ROW_MAJOR = torch.float32, torch.contiguous_format


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as rows of neighbouring elements: ``(x, rows, width, distance between rows)``; a copy where the layout is
    another.
    """
    if x.dim() == 2:
        rows, width = x.shape
        stride, step = x.stride()
        if step == 1:
            return x, rows, width, stride
    x, width = x.contiguous(), x.shape[-1]
    return x, x.numel() // width, width, width


def all_float32(*tensors: Tensor | None) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator costs more than all the rest of a small call
        if tensor is not None and tensor.dtype is not FLOAT32:
            return False
    return True


def are_rows_of(x: Tensor, *vectors: Tensor | None) -> bool:
    """True for dense vectors as long as a row of ``x``: kernels take their addresses."""
    for vector in vectors:
        if vector is not None and not (vector.shape == x.shape[-1:] and vector.is_contiguous()):
            return False
    return True


def pointer(tensor: Tensor | None) -> int:
    """Of a contiguous vector; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()

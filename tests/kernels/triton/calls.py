"""Inputs, poison and comparison for the tests of Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
new = torch.empty


def poison(*shape: Any, **options: Any) -> Tensor:
    """``torch.empty`` whose every byte is 0xff: NaN in each float type, and no code that kernels write."""
    out = new(*shape, **options)
    if out.device.type != "meta":
        out.view(torch.uint8).fill_(255)
    return out


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def close(got: Tensor, exact: Tensor, tolerance: float | None = None) -> None:
    """The largest error is within ``tolerance``, or that of the type, relative to the largest value."""
    assert got.shape == exact.shape
    error = (got.double() - exact).abs().amax() if got.numel() else torch.zeros(())
    assert bool(error <= (tolerance or TOLERANCE[got.dtype]) * exact.abs().amax().clamp_min(1e-6)), float(
        error
    )

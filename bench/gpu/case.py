"""A kernel at one shape: how its inputs are made, what runs, what is right, and what it should take.

Modules of ``bench.gpu.cases`` export ``cases() -> list[Case]``; ``bench.gpu.run`` checks each on fresh random inputs,
and only then times it. This module needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
        op, kernel: the dialect op and the kernel's name in ``kernels.select``'s table.
        shape: what is peculiar about it, such as ``prefill 2048, 32/32 heads, d128``.
        dtype: ``bf16``, ``fp8``, ``int8``, ``int4``: what is stored, for the reader.
        make: fresh inputs on a device from a generator; called anew for each check and each timing.
        run: the kernel, on what ``make`` gave.
        reference: the same in float64, by plain torch, from the same inputs.
        tolerance: most ``max |run - reference| / max |reference|``.
        bytes: bytes that must cross memory once. flops: multiply-adds counted twice.
        published_us: a published time on an H200 for this shape, in microseconds, with its source in the module.
        most: the most ``time / published_us`` that is called good.
    """

    op: str
    kernel: str
    shape: str
    dtype: str
    make: Callable[[torch.device, torch.Generator], Inputs]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: float
    bytes: int
    flops: int
    published_us: float | None = None
    most: float | None = None

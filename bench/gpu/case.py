"""A kernel at a shape: inputs, call, reference, and expected time.

Modules of ``bench.gpu.cases`` export ``cases() -> list[Case]``. ``bench.gpu.run`` checks each case on fresh random
inputs, and times a case only after a successful check. The module needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A kernel at a shape.

    Attributes:
        op, kernel: the dialect op and the kernel's name in ``kernels.select``'s table.
        shape: description of the shape, for example ``prefill 2048, 32/32 heads, d128``.
        dtype: ``bf16``, ``fp8``, ``int8``, ``int4``: the stored type, for the reader.
        make: fresh inputs on a device from a generator; called for each check and each timing.
        run: the kernel, on the inputs of ``make``.
        reference: the same in float64, by plain torch, from the same inputs.
        tolerance: most ``max |run - reference| / max |reference|``.
        bytes: bytes that must cross memory once. flops: multiply-adds counted twice.
        published_us: a published time on an H200 for the shape, in microseconds, with the source in the module.
        most: the highest good ``time / published_us``.
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

"""Kernels for NVIDIA GPUs, in Triton, and the choice between Triton's kernels and the vendor's.

Importing the package is cheap. ``kernels`` imports Triton; without Triton (a CPU build of torch) there are no rows, and
every op runs the reference.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optkit.kernels.kernel import Kernel


@cache
def available() -> bool:
    """True where Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> tuple[Kernel, ...]:
    """Rows for targets of kind ``cuda``, best first for each op."""
    if not available():
        return ()
    from optkit.kernels.triton import (
        attention,
        common,
        linear,
        pointwise,
        quantize,
        rope_kv,
        sampling,
        two_four,
    )

    common.use_private_cache()
    return (
        *two_four.KERNELS,
        *linear.KERNELS,
        *pointwise.KERNELS,
        *quantize.KERNELS,
        *attention.KERNELS,
        *rope_kv.KERNELS,
        *sampling.KERNELS,
    )

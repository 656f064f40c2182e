"""Repairs of known errors of Triton's interpreter (3.6), to run the kernels without a GPU.

The interpreter only replaces a GPU in tests and trials and never runs a model. So the repairs are here, apart from
the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from optkit.kernels.triton import available


@contextmanager
def repaired() -> Iterator[None]:
    """Inside the block, loops run to bounds computed by kernels, and E4M3 rounds as on a GPU.

    Does nothing without Triton.
    """
    if not available():
        yield
        return
    from triton.runtime import interpreter

    before = {name: getattr(interpreter, name) for name in REPAIRS}
    for name, repair in REPAIRS.items():
        setattr(interpreter, name, repair(before[name]))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(interpreter, name, value)


def numbers_as_bounds(patch: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_patch_lang_tensor``: its scalars are arrays of length 1, which NumPy 2.4 does not accept as integers."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def rounding_as_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_convert_float``, which drops the carry where E4M3 rounds up to a power of two: 127.9 becomes 64."""
    import triton.language as tl

    bits = {tl.float16: (torch.float16, torch.int16), tl.float32: (torch.float32, torch.int32)}

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        tensor = torch.from_numpy(np.array(values))
        if target == tl.float8e4nv and source == tl.float32:
            return tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in bits:
            dtype, integer = bits[target]
            return tensor.view(torch.float8_e4m3fn).to(dtype).view(integer).numpy()
        return convert(values, source, target, rounding)

    return converted


REPAIRS = {"_patch_lang_tensor": numbers_as_bounds, "_convert_float": rounding_as_torch}

"""Triton's interpreter (3.6), made right where it is known to be wrong: to run the kernels where there is no GPU.

It is a stand-in for a GPU, never what a model runs on; so its repairs are here, and not with the kernels.
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
    """Within it, loops run to the bounds that kernels compute, and E4M3 rounds as on a GPU. Nothing without Triton."""
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
    """Of ``_patch_lang_tensor``: its scalars are arrays of one element, for NumPy 2.4 no integers."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def rounding_as_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``_convert_float``, which drops the carry where E4M3 rounds up to a power of two: 127.9 becomes 64."""
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

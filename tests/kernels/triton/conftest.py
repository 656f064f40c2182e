"""Triton's interpreter, made right where it is known to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from optkit.kernels.triton import available


@pytest.fixture(autouse=True)
def float8_rounds_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 drops the carry when it rounds up to a power of two in E4M3: 127.9 becomes 64.

    PyTorch converts in its place, both ways.
    """
    if not available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    bits = {tl.float16: (torch.float16, torch.int16), tl.float32: (torch.float32, torch.int32)}

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        tensor = torch.from_numpy(np.array(values))
        if target == tl.float8e4nv and source == tl.float32:
            return tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in bits:
            dtype, integer = bits[target]
            return tensor.view(torch.float8_e4m3fn).to(dtype).view(integer).numpy()
        return convert(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(autouse=True)
def bounds_of_loops_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes for integers."""
    if not available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def tensors_are_on_the_gpu_if_there_is_one() -> Iterator[None]:
    """There the same tests run compiled kernels."""
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    yield
    torch.set_default_device(None)

"""The kernels run by Triton's interpreter, repaired; where there is a GPU, compiled and on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu.interpreter import repaired


@pytest.fixture(autouse=True)
def numbers_are_the_same_in_every_run() -> None:
    """Errors are compared with the largest value, and three values can all lie where a gate is nearly zero."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def interpreter_is_repaired() -> Iterator[None]:
    with repaired():
        yield


@pytest.fixture(autouse=True)
def tensors_are_on_the_gpu_if_there_is_one() -> Iterator[None]:
    """There the same tests run compiled kernels."""
    if not torch.cuda.is_available():
        yield
        return
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)

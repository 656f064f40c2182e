"""Threads and instruction set as they were: tests of kernels change both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optkit.kernels.cpu import native


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if native.available():
        native.set_isa(None)

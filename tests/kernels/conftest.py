"""The instruction set as it was: tests of kernels change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optkit.kernels.cpu import native


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    if native.available():
        native.set_isa(None)

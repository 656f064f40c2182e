"""A described CPU with the instruction set of the local one: nothing is measured, and no model code is imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optkit.machine import target as targets
from optkit.machine.target import Target, cpu_isa, kept, machine_facts

TARGET = Target("cpu", "cpu", cpu_isa(), 2, 1 << 33, 1e11, 4e11, 0.0, 0.0, 1e10, "measured")


def keep_target() -> None:
    """Write ``TARGET`` to optkit's cache for new processes, which would measure the machine for seconds."""
    for threads in ("", "1"):  # OMP_NUM_THREADS
        kept("cpu", machine_facts(threads), lambda: TARGET)


@pytest.fixture(scope="module", autouse=True)
def not_measured() -> Iterator[None]:
    """The machine is ``TARGET``, for all tests of a module that imports the fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "detect", lambda refresh=False: TARGET)
        yield

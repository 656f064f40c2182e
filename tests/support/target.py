"""A described CPU with the instruction set of the local one: nothing is measured, and no model code is imported."""

from __future__ import annotations

from optkit.machine.target import Target, cpu_isa, cpu_model, kept, usable_cores

TARGET = Target("cpu", "cpu", cpu_isa(), 2, 1 << 33, 1e11, 4e11, 0.0, 0.0, 1e10, "measured")


def keep_target() -> None:
    """Write ``TARGET`` to optkit's cache for new processes, which would measure the machine for seconds."""
    for threads in ("", "1"):  # OMP_NUM_THREADS
        kept("cpu", [cpu_model(), cpu_isa(), usable_cores(), threads], lambda: TARGET)

"""A described CPU with the instruction set of the local one: nothing is measured, and no model code is imported."""

from __future__ import annotations

from optkit.machine.target import Target, cpu_isa

TARGET = Target("cpu", "cpu", cpu_isa(), 2, 1 << 33, 1e11, 4e11, 0.0, 0.0, 1e10, "measured")

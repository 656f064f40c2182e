"""Instruction sets of the native kernels that this machine can run."""

from __future__ import annotations

from optkit.kernels.cpu import native


def usable_isas() -> list[str]:
    """Names to force in tests; just ``portable`` where there is no native library and the tests skip."""
    if not native.available():
        return ["portable"]
    return native.usable_isas()

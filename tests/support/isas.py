"""Instruction sets of the native kernels usable on the local machine."""

from __future__ import annotations

from optkit.kernels.cpu import native


def usable_isas() -> list[str]:
    """Names to force in tests; only ``portable`` without the native library, where the tests skip."""
    if not native.available():
        return ["portable"]
    return native.usable_isas()

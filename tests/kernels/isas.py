"""Instruction sets of the native kernels that this machine can run."""

from __future__ import annotations

from optkit.errors import UserError
from optkit.kernels.cpu import native


def usable_isas() -> list[str]:
    """Names to force in tests; just ``portable`` where there is no native library and the tests skip."""
    if not native.available():
        return ["portable"]
    usable = []
    for name in native.ISAS:
        try:
            native.set_isa(name)
        except UserError:
            continue
        usable.append(name)
    native.set_isa(None)
    return usable

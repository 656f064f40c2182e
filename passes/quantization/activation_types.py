"""The type of the activations of int8 layers: int8, or bfloat16 where the CPU multiplies bfloat16 in tiles (AMX)."""

from __future__ import annotations

from typing import Literal

from optkit.kernels.cpu import native

Activations = Literal["int8", "bfloat16", "auto"]
BFLOAT16: Literal["bfloat16"] = "bfloat16"


def in_bfloat16(activations: Activations) -> bool:
    """True for bfloat16 activations; ``auto`` goes by the CPU at hand."""
    return activations == BFLOAT16 or (activations == "auto" and native.multiplies_bfloat16())

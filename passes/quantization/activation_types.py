"""The type of the activations of int8 layers: int8, or bfloat16 where the CPU multiplies bfloat16 in tiles (AMX)."""

from __future__ import annotations

from typing import Literal

from optkit.kernels.cpu import native
from optkit.machine.target import Target

Activations = Literal["int8", "bfloat16", "auto"]
BFLOAT16: Literal["bfloat16"] = "bfloat16"


def in_bfloat16(activations: Activations, target: Target) -> bool:
    """True for bfloat16 activations; ``auto`` goes by the CPU at hand where ``target`` is a CPU."""
    at_hand = target.kind == "cpu" and native.multiplies_bfloat16()
    return activations == BFLOAT16 or (activations == "auto" and at_hand)

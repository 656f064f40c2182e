"""CPU kernels: the modules of this folder with kernels, and the union of their tables.

A module holds ``KERNELS``, best first for each op, ``EMITTERS`` for ops in calls of programs, and ``CHAINS`` for
several ops in a single call.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optkit.kernels.cpu.emit import Chain, Emitter
    from optkit.kernels.kernel import Kernel


def modules() -> tuple[ModuleType, ...]:
    """The modules, imported on use."""
    from optkit.kernels.cpu import (
        attention,
        collectives,
        experts,
        gates,
        gather,
        heads,
        int4,
        int8,
        mlp,
        norms,
        onednn,
        recurrent,
        rope,
        sdpa,
        wna16,
    )

    first = int8, int4, wna16, experts, onednn, attention, sdpa, norms, gates, mlp
    return *first, rope, gather, heads, recurrent, collectives


def kernels() -> tuple[Kernel, ...]:
    """Rows for targets of kind ``cpu``, best first for each op."""
    return tuple(kernel for module in modules() for kernel in module.KERNELS)


@cache
def emitters() -> dict[str, Emitter]:
    """The emitters by the op's name; ops without an emitter are no calls of programs."""
    rows = [row for module in modules() for row in getattr(module, "EMITTERS", ())]
    return {row.op: row for row in rows}


@cache
def chains() -> tuple[Chain, ...]:
    """The chains of ops that become one call of a program."""
    return tuple(chain for module in modules() for chain in getattr(module, "CHAINS", ()))

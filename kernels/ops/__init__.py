"""Kernels: the implementations of each op on each target, an explicit table for each kind of device, best first.

``reference`` is the spec. ``select(op, target)`` returns the first kernel of ``table`` that supports the target, else
None for the reference. A graph node can pin a kernel by name (the ``flash_attention`` pass does); ``"reference"``
pins the spec. ``"plain"`` is the pin of captured attention: PyTorch's own attention on a CPU, as in the model before
any pass. Speed-ups are measured against the plain kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optkit.kernels.kernel import Kernel

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.machine.target import Target


PLAIN = "plain"
PLAIN_KERNELS = {"cpu": "sdpa"}  # by kind of target; on other kinds the best kernel


_OF_PLUGINS: dict[str, list[Kernel]] = {}


def add(kind: str, rows: Sequence[Kernel]) -> None:
    """Add kernels for ops of a plug-in, for targets of ``kind``."""
    _OF_PLUGINS.setdefault(kind, []).extend(rows)


def table(kind: str = "cpu") -> tuple[Kernel, ...]:
    """The kernels for targets of ``kind``, best first for each op.

    Modules are imported on use: the package stays cheap.
    """
    if kind == "cuda":
        from optkit.kernels import triton

        return (*triton.kernels(), *_OF_PLUGINS.get(kind, ()))
    from optkit.kernels import cpu

    return (*cpu.kernels(), *_OF_PLUGINS.get(kind, ()))


def select(
    op: str,
    target: Target | None,
    pinned: str | None = None,
    weights: dict[int, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Kernel | None:
    """The kernel for ``op`` on ``target``, given the weights and options of a site where known.

    None means the reference, also for a plain pin at a site beyond the plain kernel.

    Raises:
        LookupError: ``pinned`` names no kernel of the op for the target.
    """
    if target is None or pinned == "reference":
        return None
    candidates = [kernel for kernel in table(target.kind) if kernel.op == op and kernel.supports(target)]
    if weights is not None:
        candidates = [k for k in candidates if k.accepts is None or k.accepts(weights)]
    if options is not None:
        candidates = [k for k in candidates if k.handles is None or k.handles(options)]
    if pinned == PLAIN:
        wanted = PLAIN_KERNELS.get(target.kind)
        candidates = [kernel for kernel in candidates if wanted in (None, kernel.name)]
    elif pinned is not None:
        candidates = [kernel for kernel in candidates if kernel.name == pinned]
        if not candidates:
            raise LookupError(f"no kernel '{pinned}' for {op} on {target.name}")
    return candidates[0] if candidates else None

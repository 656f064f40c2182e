"""Kernels: what runs each dialect op on each target. One explicit table, best first.

``reference.py`` is the spec. ``select(op, target)`` gives the first kernel in ``TABLE`` that supports the target,
else None, which means the reference itself. A graph node can pin a kernel by name (the ``flash_attention``
pass does); ``"reference"`` pins the spec. ``"plain"`` is the pin of captured attention: what a model has before any
pass, PyTorch's own attention on a CPU. Speed-ups are measured against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from optkit.machine.target import Target


PLAIN = "plain"
PLAIN_KERNELS = {"cpu": "sdpa"}  # by kind of target; elsewhere the best that there is


@dataclass(frozen=True)
class Kernel:
    """An implementation of a dialect op with the reference's signature.

    ``accepts`` says whether the kernel handles given weight tensors (by argument position); None means all.
    ``pack`` maps weight tensors, and the site's options, to the packed tensors that ``fn`` wants in their place, once,
    at load. ``handles`` says whether it runs a site with given options (``Graph.site_options``); None means all.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    supports: Callable[[Target], bool]
    pack: Callable[[dict[int, Tensor], Mapping[str, Any]], Mapping[int, Tensor]] | None = None
    accepts: Callable[[dict[int, Tensor]], bool] | None = None
    handles: Callable[[Mapping[str, Any]], bool] | None = None


def table(kind: str = "cpu") -> tuple[Kernel, ...]:
    """The kernels for targets of ``kind``, best first for each op. Imported on use: this package stays cheap."""
    if kind == "cuda":
        from optkit.kernels import triton

        return triton.kernels()
    from optkit.kernels.cpu import attention, int4, int8, onednn, pointwise, sdpa, wna16

    return (
        *int8.KERNELS,
        *int4.KERNELS,
        *wna16.KERNELS,
        *onednn.KERNELS,
        *attention.KERNELS,
        *sdpa.KERNELS,
        *pointwise.KERNELS,
    )


def select(
    op: str,
    target: Target | None,
    pinned: str | None = None,
    weights: dict[int, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Kernel | None:
    """The kernel for ``op`` on ``target``, given the weights and options of a site where known.

    None means the reference, also for a plain pin where the plain kernel does not run the site.

    Raises:
        LookupError: ``pinned`` names no kernel of this op that runs on the target.
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

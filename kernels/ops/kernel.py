"""A row of the kernel tables: an implementation of an op, with targets, weights and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.machine.target import Target


@dataclass(frozen=True)
class Kernel:
    """An implementation of an op with the reference's signature.

    Attributes:
        op: the name of the op.
        name: the name for pins in graphs; rows of one op may share a name.
        fn: the function that runs, called like the reference.
        supports: true for targets of ``fn``.
        pack: maps weight tensors (by argument position) and the site's options to packed tensors, the weight
            arguments of ``fn``; called once, at load. None: weights stay unchanged.
        accepts: true for weight tensors (by argument position) within the limits of ``fn``; None: all.
        handles: true for options of a site (``Graph.site_options``) within the limits of ``fn``; None: all.
        needs: the conditions of ``supports``, ``accepts`` and ``handles`` in words, beyond those of the whole module.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    supports: Callable[[Target], bool]
    pack: Callable[[dict[int, Tensor], Mapping[str, Any]], Mapping[int, Tensor]] | None = None
    accepts: Callable[[dict[int, Tensor]], bool] | None = None
    handles: Callable[[Mapping[str, Any]], bool] | None = None
    needs: str = ""

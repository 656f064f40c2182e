"""The number of threads of parallel native calls: torch's where torch is imported, so that both share one setting."""

from __future__ import annotations

import os
import sys
from typing import Any

from optkit.machine.target import usable_cores

VARIABLE = "OMP_NUM_THREADS"  # the default, as in torch

_chosen: int | None = None  # by ``set_threads``
_told: Any = None  # torch, once it has the chosen number


def threads() -> int:
    """The number of threads of a parallel call."""
    torch = sys.modules.get("torch")
    if getattr(torch, "get_num_threads", None) is None:
        return _chosen or default_threads()
    if _chosen is not None and torch is not _told:  # imported since then
        set_threads(_chosen)
    return int(torch.get_num_threads())  # type: ignore[union-attr]


def set_threads(count: int) -> None:
    """Use ``count`` threads from now on, in torch, too, also if torch is imported later."""
    global _chosen, _told
    _chosen = count
    torch = sys.modules.get("torch")
    if (tell := getattr(torch, "set_num_threads", None)) is not None:
        _told = torch
        tell(count)


def default_threads() -> int:
    """The number in ``OMP_NUM_THREADS``, or else of the cores."""
    given = os.environ.get(VARIABLE, "")
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores()

"""Rows of logits in memory of the CPU, as NumPy arrays: an engine on a CPU needs no torch.

The logits of a GPU stay tensors (``optkit.runtime.cuda.device_logits``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    Logits = np.ndarray | Tensor  # [L, V] or [V] float32, in memory of the CPU or on a device

ROWS = 64  # of the table that logits are searched in


def on_host(logits: Logits) -> Logits:
    """A tensor in memory of the CPU as an array of the same memory; an array, or a tensor on a device, unchanged."""
    return logits if isinstance(logits, np.ndarray) or logits.device.type != "cpu" else logits.numpy()


def take_rows(logits: Logits, rows: Sequence[int]) -> Logits:
    """``logits[rows]`` [n, V] of ``logits`` [L, V], for ascending ``rows``: a view if no row lies between them."""
    if not rows:
        return logits[:0]
    if rows[-1] - rows[0] == len(rows) - 1:
        return logits[rows[0] : rows[-1] + 1]
    return logits[list(rows)]


def largest(logits: np.ndarray, count: int) -> np.ndarray:
    """The tokens of the ``count`` largest of ``logits`` [V], the largest first, ties by number: [n] int64.

    Fewer where NaN stands among the logits.
    """
    columns = len(logits) // ROWS
    if count < columns:
        whole = columns * ROWS
        table = logits[:whole].reshape(ROWS, columns)
        tops = table.max(axis=0)  # one pass over all logits; the rest looks at a few columns
        least = np.partition(tops, -count)[-count]  # ``count`` columns have a logit as large
        near = np.flatnonzero(tops >= least)
        rows, places = np.nonzero(table[:, near] >= least)
        rest = whole + np.flatnonzero(logits[whole:] >= least)
        found = np.concatenate((rows * columns + near[places], rest))
    else:
        count = min(count, len(logits))
        found = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return found[np.lexsort((found, -logits[found]))[:count]]

"""The 2:4 pattern: of each four values in a row of a weight at most two are not zero; tensor cores can skip zeros."""

from __future__ import annotations

from torch import Tensor

GROUP, KEPT = 4, 2
FIRST_ROWS = 64  # that refuse most dense weights at once
STORED = 9 / 16  # of a dense 16-bit weight's bytes: half of the values, and two bits of place for each


def is_two_four(weight: Tensor) -> bool:
    """True where each four values in a row of ``weight`` [N, K] hold at most two that are not zero."""
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        return False
    return holds(weight[:FIRST_ROWS]) and holds(weight[FIRST_ROWS:])


def holds(rows: Tensor) -> bool:
    return bool(((rows != 0).unflatten(1, (-1, GROUP)).sum(-1) <= KEPT).all())

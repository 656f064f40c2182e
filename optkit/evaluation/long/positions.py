"""KL divergence by position, up to the end of a long context.

The logits of 8,192 positions of a vocabulary of 49,152 are 1.6 GB. So only some positions of each range are scored, the
same positions on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.evaluation.long.sources import RowSource
from optkit.evaluation.quality import PositionScore, compare_rows, mean_estimate, position_ranges

SCORED = 32  # positions of a range


def kl_by_position(
    candidate: RowSource, reference: RowSource, windows: Sequence[Sequence[int]]
) -> tuple[PositionScore, ...]:
    """KL(reference || candidate) in nats and top-1 agreement, by ranges of positions of windows of equal length.

    Raises:
        FloatingPointError: a divergence is NaN.
    """
    ranges = list(position_ranges(len(windows[0])))
    parts = [chosen(first, last) for first, last in ranges]
    positions = [position for part in parts for position in part]
    columns: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ranges]
    for window in windows:
        kl, same = compare_rows(reference.rows(window, positions), candidate.rows(window, positions))
        if kl.isnan().any():
            raise FloatingPointError("the divergence of a position is NaN")
        lengths = [len(part) for part in parts]
        for column, pair in zip(
            columns, zip(kl.split(lengths), same.split(lengths), strict=True), strict=True
        ):
            column.append(pair)
    return tuple(
        PositionScore(first, last, *(mean_estimate(list(side)) for side in zip(*column, strict=True)))
        for (first, last), column in zip(ranges, columns, strict=True)
    )


def chosen(first: int, last: int) -> list[int]:
    """At most ``SCORED`` positions of a range, at equal distances."""
    return sorted({int(position) for position in torch.linspace(first, last, min(SCORED, last - first + 1))})

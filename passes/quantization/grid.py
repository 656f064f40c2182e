"""Levels for groups of weights, for any number of bits.

Groups are runs of consecutive input channels of a weight row; the last group may be shorter. A level is ``code * scale
+ minimum`` in every kind of grid: symmetric grids lie around zero (``minimum = -2^(bits - 1) * scale``), asymmetric
grids have an integer zero point (``minimum = -zero * scale``) or a float minimum (``int4_grid``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HALF = torch.finfo(torch.float16)
NUMBERS_AT_ONCE = 1 << 24  # weights that are rounded together: 64 MB in float32, and a few copies


class Grid(Protocol):
    """The grid of a format for solvers: the channels of a group, and the best fit of a grid to values.

    ``group_size`` 0 is a whole row. Codes are ``lowest`` .. ``highest``.
    """

    @property
    def group_size(self) -> int: ...
    @property
    def lowest(self) -> int: ...
    @property
    def highest(self) -> int: ...
    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, minimum) [..., 1] float32 of groups [..., g]; scales are above 0."""
        ...

    def span(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """``fit`` by the extremes alone: fast, for values clipped in a search."""
        ...


@dataclass(frozen=True)
class IntegerGrid:
    """``bits`` a code; symmetric, or with an integer zero point.

    ``half`` rounds scales to float16 before codes are chosen, so codes match the stored scales.
    Symmetric grids of 8 bits leave the lowest code out, as int8 kernels want.
    """

    bits: int
    group_size: int = 0
    symmetric: bool = True
    half: bool = True

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def lowest(self) -> int:
        return 1 if self.bits == 8 and self.symmetric else 0

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        if self.symmetric:
            scale = self.stored(groups.abs().amax(dim=-1, keepdim=True) / ((self.highest - self.lowest) / 2))
            return scale, -(1 << (self.bits - 1)) * scale
        low = groups.amin(dim=-1, keepdim=True).clamp_max(0)
        high = groups.amax(dim=-1, keepdim=True).clamp_min(0)
        scale = self.stored((high - low) / self.highest)
        return scale, -(-low / scale).round().clamp(0, self.highest) * scale

    def span(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        return self.fit(groups)

    def stored(self, scale: Tensor) -> Tensor:
        """The scale as stored: within float16's range with ``half``. A group of zeros has any scale."""
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        if not self.half:
            return scale
        return scale.clamp(HALF.smallest_normal, HALF.max).to(torch.float16).to(torch.float32)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight on a grid: codes [N, K] uint8, scale and minimum [N, G] float32.

    ``g_idx`` [K] int32 gives each channel's group where groups are not runs of channels (GPTQ's act-order).
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    g_idx: Tensor | None = None

    def dequantize(self, group_size: int) -> Tensor:
        """The float32 weight [N, K] of the codes."""
        group = group_of(self.codes.shape[1], group_size) if self.g_idx is None else self.g_idx.long()
        return self.codes.to(torch.float32) * self.scale[:, group] + self.minimum[:, group]


def group_of(columns: int, group_size: int) -> Tensor:
    """The group of each channel [columns] int64."""
    return torch.arange(columns) // (group_size or columns)


def runs(columns: int, group_size: int) -> Iterator[slice]:
    """Runs of channels with groups of equal length: the whole groups, and a shorter last group."""
    size = group_size or columns
    whole = columns - columns % size
    if whole:
        yield slice(0, whole)
    if whole < columns:
        yield slice(whole, columns)


def fit_groups(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """(scale, minimum) [N, G] of every group of weight [N, K]."""
    size = grid.group_size or weight.shape[1]
    fits = [
        grid.fit(weight[:, run].unflatten(1, (-1, min(size, run.stop - run.start))))
        for run in runs(weight.shape[1], grid.group_size)
    ]
    scale, minimum = (torch.cat([fit[i][..., 0] for fit in fits], dim=1) for i in (0, 1))
    return scale, minimum


def nearest_codes(weight: Tensor, scale: Tensor, minimum: Tensor, grid: Grid) -> Tensor:
    """The codes of the levels nearest to weight; all arguments broadcast. Floats."""
    return ((weight - minimum) / scale).round_().clamp_(grid.lowest, grid.highest)


def round_to_nearest(weight: Tensor, grid: Grid) -> QuantizedWeight:
    """Round every weight of [N, K] to the nearest level of the group's grid (RTN).

    Rows are rounded some at a time, since float32 copies of a whole output head are gigabytes.
    """
    rows = max(1, NUMBERS_AT_ONCE // max(1, weight.shape[1]))
    parts = [_rounded_rows(part.to(torch.float32), grid) for part in weight.split(rows)]
    return QuantizedWeight(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _rounded_rows(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, K] uint8, scales and minimums [n, G] of rows [n, K] float32."""
    scale, minimum = fit_groups(weight, grid)
    group = group_of(weight.shape[1], grid.group_size)
    codes = nearest_codes(weight, scale[:, group], minimum[:, group], grid)
    return codes.to(torch.uint8), scale, minimum

"""The 16 levels for a group of weights, and the rounding to the levels.

Groups are runs of consecutive input channels of a weight row. A level is ``(code - zero) * scale + minimum`` with codes
0 to 15: symmetric grids have zero 8 and no minimum, asymmetric grids zero 0 and a float minimum.

The grid spans the group's values. Scales and minimums are rounded to float16 where the loss is negligible, before codes
are chosen, so the codes fit the stored scales. A group of at most 16 distinct values may come from a 4-bit checkpoint
whose group does not use all 16 codes; the old grid is then wider than the values. For such a group, grids with the
least and the greatest value on other codes are tried, and the closest grid is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from optkit.kernels.reference import INT4_ZERO_POINT

if TYPE_CHECKING:
    from optkit.passes.quantization.grid import QuantizedWeight

LEVELS = 16
HALF_ERROR = 2.0**-10  # of a scale; float16 rounds to half of it
REPEATS = 4  # equal pairs at least, among LEVELS + REPEATS values of which at most LEVELS differ
ON_GRID = 1 / 64  # of a step: values as close to a level were on the grid before an earlier rounding


@dataclass(frozen=True)
class Int4Weight:
    """codes [N, K] uint8, scale [N, G] and minimum [N, G] float16 or float32; minimum is None if symmetric."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


@dataclass(frozen=True)
class Int4Grid:
    """The grids of ``quantize_int4`` as a ``grid.Grid``, for solvers."""

    group_size: int
    symmetric: bool
    lowest: ClassVar[int] = 0
    highest: ClassVar[int] = LEVELS - 1

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, minimum) [..., 1], through the stored type. A group of equal values has any scale."""
        return self._grid(groups, snap=True)

    def span(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        return self._grid(groups, snap=False)

    def _grid(self, groups: Tensor, snap: bool) -> tuple[Tensor, Tensor]:
        shape, groups = groups.shape, groups.reshape(-1, 1, groups.shape[-1])
        scale, minimum = fitted_grid(groups, self.symmetric, snap)
        scale = torch.where(scale > 0, scale.to(torch.float32), 1.0)
        minimum = -INT4_ZERO_POINT * scale if self.symmetric else minimum.to(torch.float32)
        return scale.reshape(*shape[:-1], 1), minimum.reshape(*shape[:-1], 1)

    def stored_type(self, weight: QuantizedWeight) -> torch.dtype:
        """float16 where all grids are float16 numbers, as from ``fit`` where possible."""
        values = (weight.scale,) if self.symmetric else (weight.scale, weight.minimum)
        if weight.scale.device.type == "meta":
            return torch.float16
        exact = all(torch.equal(v.to(torch.float16).to(torch.float32), v) for v in values)
        return torch.float16 if exact else torch.float32


def quantize_int4(weight: Tensor, group_size: int, symmetric: bool) -> Int4Weight:
    """Round weight [N, K] to the nearest levels of the groups' grids."""
    groups = weight.unflatten(1, (-1, group_size)).to(torch.float32)  # [N, G, g]
    scale, minimum = fitted_grid(groups, symmetric)
    zero = INT4_ZERO_POINT if symmetric else 0
    codes = nearest(groups, scale.to(torch.float32), minimum.to(torch.float32), zero)
    low = None if symmetric else minimum[..., 0]
    return Int4Weight(codes.to(torch.uint8).reshape(weight.shape), scale[..., 0], low)


def fitted_grid(groups: Tensor, symmetric: bool, snap: bool = True) -> tuple[Tensor, Tensor]:
    """(scale, minimum) [N, G, 1] of groups [N, G, g] in the stored types; ``snap`` to a former grid."""
    scale, minimum = spanning_grid(groups, symmetric)
    kept, kept_minimum = half_if_enough(scale, scale), half_if_enough(minimum, scale)
    scale, minimum = kept.to(torch.float32), kept_minimum.to(torch.float32)
    if snap:
        snap_to_grid(groups, scale, minimum, INT4_ZERO_POINT if symmetric else 0)
    return scale.to(kept.dtype), minimum.to(kept_minimum.dtype)


def spanning_grid(groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scale, minimum) [N, G, 1] of grids up to a group's extremes; symmetric grids miss an end by half a step."""
    if symmetric:
        scale = groups.abs().amax(dim=-1, keepdim=True) / ((LEVELS - 1) / 2)
        return scale, torch.zeros_like(scale)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    return (high - low) / (LEVELS - 1), low


def half_if_enough(value: Tensor, scale: Tensor) -> Tensor:
    """``value`` in float16 where no number moves by more than 2^-10 of the number or of the scale."""
    half = value.to(torch.float16)
    error = (half.to(torch.float32) - value).abs()
    return half if bool((error <= HALF_ERROR * torch.maximum(value.abs(), scale)).all()) else value


def nearest(groups: Tensor, scale: Tensor, minimum: Tensor, zero: int) -> Tensor:
    """The codes of the nearest levels, as floats. A scale of 0 has a single level."""
    steps = torch.where(scale != 0, (groups - minimum) / scale, torch.zeros((), device=groups.device))
    return (steps + zero).round_().clamp_(0, LEVELS - 1)


def largest_error(groups: Tensor, scale: Tensor, minimum: Tensor, zero: int) -> Tensor:
    """The largest rounding error of each group [..., 1]."""
    levels = (nearest(groups, scale, minimum, zero) - zero) * scale + minimum
    return (levels - groups).abs().amax(dim=-1, keepdim=True)


# -- grids of values that were 4-bit before ----------------------------------------------------------------


def snap_to_grid(groups: Tensor, scale: Tensor, minimum: Tensor, zero: int) -> None:
    """Improve ``scale`` and ``minimum`` in place, for groups of few values off the levels."""
    few = may_be_few(groups)
    values, steps = groups[few], scale[few]
    distinct = (values.sort(dim=-1).values.diff(dim=-1) != 0).sum(dim=-1) + 1
    error = largest_error(values, steps, minimum[few], zero)
    off = (distinct <= LEVELS) & (error > ON_GRID * steps)[..., 0]
    if not bool(off.any()):
        return
    chosen = few.masked_scatter(few, off)
    values, best, best_minimum, error = values[off], scale[chosen], minimum[chosen], error[off]
    for other, other_minimum in symmetric_grids(values) if zero else asymmetric_grids(values):
        other_error = largest_error(values, other, other_minimum, zero)
        closer = other_error < error
        error = torch.where(closer, other_error, error)
        best = torch.where(closer, other, best)
        best_minimum = torch.where(closer, other_minimum, best_minimum)
    scale[chosen], minimum[chosen] = best, best_minimum


def may_be_few(groups: Tensor) -> Tensor:
    """True for each group [..., g] that may have at most ``LEVELS`` distinct values, and for few others: [...].

    Of the first m values of such a group m - ``LEVELS`` at least repeat an earlier one, so as many pairs are equal.
    Counting the pairs of m values takes a third of the time of sorting all groups.
    """
    first = groups[..., : LEVELS + REPEATS].movedim(-1, 0).contiguous()
    pairs = torch.zeros(groups.shape[:-1], dtype=torch.uint8, device=groups.device)
    for one, other in itertools.combinations(first, 2):
        pairs += (one == other).view(torch.uint8)
    return pairs >= max(0, len(first) - LEVELS)


def symmetric_grids(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Grids with the value of largest magnitude on any code; in GGUF's Q4_0 on code 0, with either sign."""
    peak = values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))
    for steps in range(-INT4_ZERO_POINT, LEVELS - INT4_ZERO_POINT):
        if steps:
            yield through_half(peak / steps), torch.zeros_like(peak)


def asymmetric_grids(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Grids with the least value on any code and the greatest on any code above."""
    low, high = values.amin(dim=-1, keepdim=True), values.amax(dim=-1, keepdim=True)
    for steps in range(LEVELS - 1, 0, -1):
        scale = through_half((high - low) / steps)
        for first in range(LEVELS - steps):
            yield scale, through_half(low - first * scale)


def through_half(value: Tensor) -> Tensor:
    return value.to(torch.float16).to(torch.float32)

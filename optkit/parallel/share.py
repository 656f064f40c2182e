"""Shares: a rank's part of a tensor's dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from optkit.kernels.collectives import borders, shares


@dataclass(frozen=True)
class Share:
    """A dimension, shared out among the ranks.

    Attributes:
        dim: the dimension of the whole value.
        parts: sizes of the pieces side by side in the dimension, for example q, k and v of a fused layer. A rank has a
            share of each piece.
        unit: a share is whole units.
        sources: names of the linear layers with these columns.
        fixed: the borders lie between KV heads, so another unit must keep the borders.
    """

    dim: int
    parts: tuple[int, ...]
    unit: int = 1
    sources: frozenset[str] = frozenset()
    fixed: bool = False

    def sizes(self, rank: int, size: int) -> list[int]:
        """The number of elements of ``rank`` in each piece."""
        return [shares(part, self.unit, size)[rank] for part in self.parts]

    def local(self, rank: int, size: int) -> int:
        """The number of elements of ``rank``."""
        return sum(self.sizes(rank, size))

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """The elements of ``rank`` in the whole dimension, a range for each piece."""
        found, start = [], 0
        for part in self.parts:
            edges = borders(part, self.unit, size)
            found.append((start + edges[rank], start + edges[rank + 1]))
            start += part
        return tuple(found)

    def fits(self, size: int) -> bool:
        """True where every piece is whole units, at least a unit for every rank."""
        return all(part % self.unit == 0 and part // self.unit >= size for part in self.parts)

    def is_even(self, size: int) -> bool:
        """True where all ranks get equally much of every piece."""
        return all(len(set(shares(part, self.unit, size))) == 1 for part in self.parts)

    def aligned(self, step: int, size: int) -> Share | None:
        """The same borders with a multiple of ``step`` as unit; None where a border is no multiple."""
        coarse = replace(self, unit=math.lcm(self.unit, step))
        same = coarse.fits(size) and all(
            borders(part, self.unit, size) == borders(part, coarse.unit, size) for part in self.parts
        )
        return coarse if same else None

    def divided(self, by: int, dim: int | None = None) -> Share:
        """The share of a dimension with an element for every ``by`` elements."""
        parts = tuple(part // by for part in self.parts)
        return replace(self, parts=parts, unit=self.unit // by, dim=self.dim if dim is None else dim)

    def multiplied(self, by: int, dim: int) -> Share:
        """The share of a dimension with ``by`` elements for each element."""
        return replace(self, parts=tuple(part * by for part in self.parts), unit=self.unit * by, dim=dim)


def merged(found: Iterable[Share]) -> Share | None:
    """The common share of values for an op on equal elements; None where the shares differ."""
    first, *others = found
    if any((o.dim, o.parts, o.unit) != (first.dim, first.parts, first.unit) for o in others):
        return None
    sources = first.sources.union(*(other.sources for other in others))
    return replace(first, sources=sources, fixed=first.fixed or any(other.fixed for other in others))

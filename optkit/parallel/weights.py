"""A rank's part of weights. Weights on disk stay there: only the rank's rows and columns are read, for packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from optkit.graph.ir import Graph, Weight
from optkit.graph.stored import Place, StoredPart, StoredTensor

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A part of a weight: ``ranges`` of dimension ``dim``, and then ``zeros`` rows of zeros."""

    dim: int
    ranges: Ranges
    zeros: int = 0


class Parts:
    """The parts of the weights of ``graph`` for a rank. Equal parts are a single weight."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[str, Part], str] = {}

    def node(self, weight: fx.Node, part: Part, before: fx.Node) -> fx.Node:
        """A node in front of ``before``, which reads ``part`` of the weight of the node ``weight``."""
        name = str(weight.target)
        if (name, part) not in self.made:
            number = sum(known == name for known, _ in self.made)
            self.made[name, part] = f"{name}.part{number}"
            stored = self.graph.weights[name].stored
            self.graph.weights[self.made[name, part]] = Weight(part_of(stored, part), None)
        return self.graph.weight_node(self.made[name, part], before)


def part_of(stored: Tensor | StoredTensor, part: Part) -> Tensor | StoredTensor:
    """``part`` of a weight; a tensor in memory is copied only where the elements are not neighbours."""
    if isinstance(stored, StoredTensor):
        if not part.zeros and (found := stored_part(stored, part)) is not None:
            return found
        stored = stored.read()
    pieces = [stored.narrow(part.dim, start, stop - start) for start, stop in part.ranges]
    if part.zeros:
        shape = list(stored.shape)
        shape[part.dim] = part.zeros
        pieces.append(torch.zeros(shape, dtype=stored.dtype, device=stored.device))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, part.dim)


def stored_part(stored: StoredTensor, part: Part) -> StoredTensor | None:
    """``part`` of a weight on disk; None for a range over several stacked tensors along the input channels."""
    dim = 1 - part.dim if stored.transposed else part.dim
    if dim == 0:
        pieces = [piece for start, stop in part.ranges for piece in rows_of(stored.parts, start, stop)]
        return replace(stored, parts=tuple(pieces))
    if len(part.ranges) != 1:
        return None
    start, stop = part.ranges[0]
    return replace(stored, parts=tuple(cut(piece, 1, start, stop) for piece in stored.parts))


def rows_of(parts: Sequence[StoredPart], start: int, stop: int) -> list[StoredPart]:
    """Rows ``start`` to ``stop`` of stacked ``parts``."""
    found, first = [], 0
    for part in parts:
        low, high = max(start - first, 0), min(stop - first, part.shape[0])
        if low < high:
            found.append(cut(part, 0, low, high))
        first += part.shape[0]
    return found


def cut(part: StoredPart, dim: int, start: int, stop: int) -> StoredPart:
    """Elements ``start`` to ``stop`` of dimension ``dim`` of ``part``."""
    shape = tuple(stop - start if i == dim else size for i, size in enumerate(part.shape))
    place = Place(part.place.step, f"{part.place.name}[{dim}:{start}:{stop}]")
    return StoredPart(place, shape, part.dtype, partial(read_cut, part.read, dim, start, stop))


def read_cut(read: Callable[[], Tensor], dim: int, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of dimension ``dim`` of a tensor."""
    return read().narrow(dim, start, stop - start)

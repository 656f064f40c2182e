"""Weights that stay on disk: shape and dtype are known, the values are read at each use.

A graph of a large model has ``StoredTensor`` in place of tensors. Checkpoint tensors keep the dtype of the file, such
as bfloat16: ``read`` makes the weight in the dtype of the graph, and the reader frees the result after use. A fused
weight is a list of the parts of several weights, so a fusion copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """The place of a tensor: the key of the step of a run that stored it, None for the source, and the name there."""

    step: str | None
    name: str


@dataclass(frozen=True)
class StoredPart:
    """A tensor of a file.

    Attributes:
        place: equal for equal tensors.
        read: returns the tensor, as a rule mapped from disk.
    """

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @staticmethod
    def of(place: Place, read: Callable[[], Tensor]) -> StoredPart:
        """The part at ``place``; a mapped tensor is not read for shape and dtype."""
        value = read()
        return StoredPart(place, tuple(value.shape), value.dtype, read)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of ``parts`` stacked along dimension 0, then transposed if ``transposed``, in ``dtype``.

    Attributes:
        release: takes the bytes of each read, and may free the mapped pages of earlier reads.
    """

    parts: tuple[StoredPart, ...]
    dtype: torch.dtype
    transposed: bool = False
    release: Callable[[int], None] | None = None

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        stacked = (sum(part.shape[0] for part in self.parts), *first[1:]) if len(self.parts) > 1 else first
        return torch.Size(stacked[::-1] if self.transposed else stacked)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the parts. With dtype and orientation they identify the values."""
        return tuple(part.place for part in self.parts)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for equal values."""
        return (self.places, self.transposed, self.dtype)

    def read(self) -> Tensor:
        """The values: a mapped tensor if a single part has layout and dtype, else a new tensor."""
        if self.release is not None:
            self.release(self.nbytes)
        if len(self.parts) == 1:
            value = self.converted(self.parts[0].read())
            return value.T.contiguous() if self.transposed else value
        if self.transposed:
            return torch.cat([self.converted(part.read()) for part in self.parts]).T.contiguous()
        out = torch.empty(self.shape, dtype=self.wide(self.parts[0].dtype))
        start = 0
        for part in self.parts:
            out[start : start + part.shape[0]].copy_(part.read())
            start += part.shape[0]
        return out

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the values; reads no more than the parts of these rows."""
        if self.transposed:
            return self.read()[start:stop]
        if self.release is not None:
            self.release((stop - start) * (self.nbytes // max(1, self.shape[0])))
        pieces, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, part.shape[0])
            if low < high:
                pieces.append(self.converted(part.read()[low:high]))
            first += part.shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def split(self) -> list[StoredTensor]:
        """Each part by itself, as in the checkpoint."""
        return [replace(self, parts=(part,), transposed=False) for part in self.parts]

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of values stored in ``dtype``: only floats change."""
        return self.dtype if dtype.is_floating_point else dtype

    def converted(self, value: Tensor) -> Tensor:
        return value.to(self.wide(value.dtype)).contiguous()


def stack_stored(values: Sequence[Tensor | StoredTensor]) -> Tensor | StoredTensor:
    """``values`` stacked along dimension 0; stored tensors stay on disk."""
    stored = [value for value in values if isinstance(value, StoredTensor)]
    if len(stored) == len(values) and not any(value.transposed for value in stored):
        return replace(stored[0], parts=tuple(part for value in stored for part in value.parts))
    return torch.cat([value.read() if isinstance(value, StoredTensor) else value for value in values])

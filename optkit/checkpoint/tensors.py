"""Tensors of a graph on disk: the changed checkpoint tensors, and the way back from files to weights.

A graph's weights are built from checkpoint tensors (``Origin``). Saving goes the other way: every weight is split into
the checkpoint tensors of the origin, and tensors different from the source are *changed*. An artifact is the source
with the changed tensors in place of the old tensors; a cached pipeline state is the changed tensors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from optkit.checkpoint.safetensors_header import read_header
from optkit.checkpoint.safetensors_writer import save_tensors
from optkit.checkpoint.validate import CheckpointInfo
from optkit.errors import UserError
from optkit.graph.ir import Graph, Origin
from optkit.graph.stored import Place, StoredPart, StoredTensor

MAX_SHARD_BYTES = 4 << 30
STREAMED_BYTES = 1 << 30  # of float32 weights; a larger model stays on disk, its tensors are read at each use
STORED_BYTES = 1 << 20  # of a weight; smaller ones are in memory


class TensorFiles(Mapping[str, Tensor]):
    """Lazy, memory-mapped access to the tensors of a checked checkpoint directory.

    ``stored`` has the name in the file of each tensor with another name there.
    """

    def __init__(
        self, directory: Path, info: CheckpointInfo, stored: Mapping[str, str] | None = None
    ) -> None:
        self.directory, self.info, self.stored = directory, info, stored or {}
        self.files: dict[str, Any] = {}

    def names(self) -> set[str]:
        return set(self.info.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.info.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.info.tensors)

    def __len__(self) -> int:
        return len(self.info.tensors)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.info.tensors:
            raise UserError(f"tensor '{name}' is missing", where=str(self.directory))
        file = str(self.info.tensors[name].file)
        if file not in self.files:
            self.files[file] = safe_open(file, framework="pt")
        return aligned(self.files[file].get_tensor(self.stored.get(name, name)))


def load_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, mapped, after a check of its header.

    Raises:
        UserError: not a safetensors file, or a contradictory header.
    """
    read_header(file)
    return {name: aligned(tensor) for name, tensor in load_file(file).items()}


def aligned(tensor: Tensor) -> Tensor:
    """``tensor``, copied if the address in the file is not a multiple of the element size."""
    return tensor if tensor.data_ptr() % tensor.itemsize == 0 else tensor.clone()


class Overlay(Mapping[str, Tensor]):
    """Some tensors in front of a checkpoint's; what is covered is not read."""

    def __init__(self, source: Mapping[str, Tensor], over: Mapping[str, Tensor]) -> None:
        self.source, self.over = source, over

    def __contains__(self, name: object) -> bool:
        return name in self.over or name in self.source

    def __getitem__(self, name: str) -> Tensor:
        return self.over[name] if name in self.over else self.source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(set(self.source) | set(self.over))

    def __len__(self) -> int:
        return len(set(self.source) | set(self.over))


def float_bytes(info: CheckpointInfo) -> int:
    """Bytes of all tensors of a checkpoint in float32."""
    return sum(4 * math.prod(tensor.shape) for tensor in info.tensors.values())


def stored(
    origin: Origin,
    place: Callable[[str], Place],
    read: Callable[[Place], Tensor],
    dtype: torch.dtype,
    release: Callable[[int], None] | None = None,
) -> Tensor | StoredTensor:
    """A weight left on disk: its checkpoint tensors lie at ``place(name)``.

    A small one is read at once, and one whose rows are not those of its tensors (experts in one tensor).
    """
    places = {part.name: place(part.name) for part in origin.parts}
    parts = tuple(StoredPart.of(p, partial(read, p)) for p in places.values())
    found = StoredTensor(parts, dtype, origin.transposed, release)
    plain = all(given.shape[:1] == (part.rows,) for given, part in zip(parts, origin.parts, strict=False))
    if origin.stacked or not plain or len(parts) != len(origin.parts) or found.nbytes < STORED_BYTES:
        return build(origin, {name: read(p) for name, p in places.items()}, dtype).clone()
    return found


def build(origin: Origin, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A weight from checkpoint tensors, contiguous, in the dtype the graph expects."""
    value = origin.build({part.name: tensors[part.name] for part in origin.parts})
    value = value.contiguous()
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def changed_tensors(graph: Graph, source: Mapping[str, Tensor]) -> dict[str, Tensor | StoredTensor]:
    """Checkpoint tensors of ``graph`` without an equal in ``source``.

    Unchanged float weights keep the source's dtype: a bfloat16 checkpoint stays bfloat16.
    """
    changed: dict[str, Tensor | StoredTensor] = {}
    for weight in graph.weights.values():
        if weight.origin is None:
            continue
        for name, piece in weight.pieces().items():
            if isinstance(piece, StoredTensor) and piece.places == (Place(None, name),):
                continue
            if not (name in source and same(values_of(piece), source[name])):
                changed[name] = piece
    return changed


def values_of(piece: Tensor | StoredTensor) -> Tensor:
    """The values of a tensor in memory or on disk."""
    return piece.read() if isinstance(piece, StoredTensor) else piece


def same(piece: Tensor, original: Tensor) -> bool:
    if piece.is_floating_point() != original.is_floating_point() or piece.shape != original.shape:
        return False
    if piece.dtype == torch.float8_e4m3fn:
        return original.dtype == piece.dtype and torch.equal(
            piece.view(torch.uint8), original.view(torch.uint8)
        )
    return torch.equal(piece, original.to(piece.dtype))


def constants(graph: Graph) -> dict[str, Tensor]:
    """Weights without a checkpoint tensor, by graph name."""
    return {n: w.value.contiguous() for n, w in graph.weights.items() if w.origin is None}


def save_shards(tensors: Mapping[str, Tensor | StoredTensor], directory: Path) -> dict[str, str]:
    """Write ``model.safetensors``, or numbered shards of at most 4 GiB; gives tensor name to file name."""
    shards: list[dict[str, Tensor | StoredTensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].nbytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    return files

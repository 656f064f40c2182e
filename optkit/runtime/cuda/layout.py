"""A single buffer for all inputs of a step: a single copy from host to device, and constant addresses.

A step has a dozen small inputs. Copied separately, each input costs a driver call, and a captured graph reads fixed
addresses. So the inputs of a step of a given *shape* lie behind each other in a buffer, and a layout has the offsets.
Numbers of 8 bytes come first, for alignment.

A bucket larger than the batch is padded with entries ignored by kernels: token rows have slot -1 and stand behind the
last ``query_start``, sequences have length 0. ``pack`` writes every element, so no data of an earlier step is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class StepShape:
    """The size of a bucket: tokens, sequences, and blocks of the longest sequence. Each sequence may get logits.

    A shape with as many tokens as sequences is a decode, a token each, to kernels too
    (``reference.paged_attention``). Any other shape has room for more tokens than sequences.
    """

    tokens: int
    sequences: int
    blocks: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.sequences


# type, dimensions and padding by name
FIELDS: dict[str, tuple[type, tuple[str, ...], float]] = {
    "input_ids": (np.int64, ("tokens",), 0),
    "source": (np.int64, ("tokens",), -1),  # row of the step before with this token; -1: in input_ids
    "positions": (np.int64, ("tokens",), 0),
    "slot_mapping": (np.int64, ("tokens",), -1),
    "logits_index": (np.int64, ("rows",), 0),
    "uniform": (np.float64, ("rows",), 0.0),
    "query_start": (np.int32, ("starts",), 0),
    "seq_lens": (np.int32, ("sequences",), 0),
    "state_slots": (np.int32, ("sequences",), 0),
    "block_tables": (np.int32, ("sequences", "blocks"), 0),
    "temperature": (np.float32, ("rows",), 0.0),
    "top_p": (np.float32, ("rows",), 1.0),
    "min_p": (np.float32, ("rows",), 0.0),
    "top_k": (np.int32, ("rows",), 0),
}
SAMPLING_INPUTS = ("temperature", "top_k", "top_p", "min_p", "uniform")


@dataclass(frozen=True)
class Layout:
    """The offsets of the inputs of a step of ``shape`` with ``rows`` rows of logits.

    ``further`` are pairs of inputs: the first has a field like that of the second, such as the block tables of a
    further group of layers (``KVLayout.further_inputs``), and its value where it has none.
    """

    shape: StepShape
    rows: int
    further: tuple[tuple[str, str], ...] = ()

    @cached_property
    def fields(self) -> dict[str, tuple[type, tuple[str, ...], float]]:
        """Type, dimensions and padding by name, numbers of 8 bytes first."""
        fields = FIELDS | {name: FIELDS[base] for name, base in self.further}
        return dict(sorted(fields.items(), key=lambda field: -np.dtype(field[1][0]).itemsize))

    @cached_property
    def dimensions(self) -> dict[str, tuple[int, ...]]:
        s = self.shape
        sizes = {
            "tokens": s.tokens,
            "sequences": s.sequences,
            "starts": s.sequences + 1,
            "blocks": s.blocks,
            "rows": self.rows,
        }
        return {name: tuple(sizes[d] for d in dims) for name, (_, dims, _) in self.fields.items()}

    @cached_property
    def offsets(self) -> dict[str, int]:
        offsets, at = {}, 0
        for name, (kind, _, _) in self.fields.items():
            offsets[name] = at
            at += int(np.prod(self.dimensions[name])) * np.dtype(kind).itemsize
        return offsets | {"": at}

    @property
    def num_bytes(self) -> int:
        return self.offsets[""]

    def pack(self, arrays: Mapping[str, np.ndarray], buffer: np.ndarray) -> None:
        """Write ``arrays`` into ``buffer`` [>= num_bytes] uint8, and padding into the rest of each input."""
        base = dict(self.further)
        for name, (kind, _, padding) in self.fields.items():
            shape, start = self.dimensions[name], self.offsets[name]
            count = int(np.prod(shape))
            view: np.ndarray = (
                buffer[start : start + count * np.dtype(kind).itemsize].view(kind).reshape(shape)
            )
            given = arrays[name if name in arrays else base[name]]
            view[...] = given[-1] if name == "query_start" else padding
            view[tuple(slice(0, n) for n in given.shape)] = given

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The inputs in ``buffer`` [>= num_bytes] uint8 on the device, as tensors on the same memory."""
        views = {}
        for name, (kind, _, _) in self.fields.items():
            shape, start = self.dimensions[name], self.offsets[name]
            dtype = getattr(torch, np.dtype(kind).name)
            count = int(np.prod(shape)) * dtype.itemsize
            views[name] = buffer[start : start + count].view(dtype).view(shape)
        return views


def capacity(shape: StepShape, further: tuple[tuple[str, str], ...] = ()) -> int:
    """Bytes for the inputs of every step within ``shape``, with logits for at most each token."""
    return Layout(shape, shape.tokens, further).num_bytes

"""Groups of attention layers with a block table each, over one pool of blocks.

A layer with a window reads the last tokens alone, so blocks behind the window can go to other sequences. Layers of one
window need the same blocks and form *groups*; a sequence has a block table for each group. A model whose layers all
read alike has one group.

All groups take their blocks from one pool. The pool is a list of *slots*, each with a K and a V buffer, or with one for
latent KV. Block b is row b of every buffer. The owner of a block is a group of a sequence: in the first slot the row
has the KV of the group's first layer, in the second slot of the second layer, and so on. So the layers of two groups
lie in the same memory, at different rows::

    block table of      slot 0     slot 1     slot 2
    full layers    b0:  layer 5    layer 11   layer 17
    windowed, 1st  b1:  layer 0    layer 1    layer 2
    windowed, 2nd  b2:  layer 3    layer 4    layer 6

A layer with a whole fraction 1/f of the bytes of its slot shares the row with f - 1 neighbours (``KVGroup.fraction``).
Its pool is a view of the buffer with f times the blocks, so its tables and slots count in such blocks; every view is
contiguous. Layers with other ratios of bytes have no common pool: all are in one group then and keep all tokens
(``KVLayout.reason`` states the reason).

The number of slots decides how many groups there are and how many rows stay empty in the last group of a window. The
choice has the least sum of both, since an empty row costs memory and a group costs time in each step.

One more row of zeros, the *null block*, stands in tables in the place of blocks that were given back. Kernels mask the
keys before the window, and may still load them with the first keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from optkit.graph.states import (
    KV_DTYPES,
    KVSpec,
    StateSpec,
    kv_of,
    numpy_dtype,
    recurrent_of,
    torch_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

Memory = TypeVar("Memory", "Tensor", "np.ndarray")
T = TypeVar("T")


Zeros = Callable[[tuple[int, ...], str], Memory]  # makes zeros of a shape and a dtype's name


TABLE_INPUTS = ("slot_mapping", "block_tables")  # the graph inputs with the places of KV
RECURRENT_REASON = "a recurrent state that is computed again reads all tokens"
UNLIKE_REASON = "layers of unlike KV bytes can't share blocks"


@dataclass(frozen=True)
class KVGroup:
    """Attention layers with a common block table.

    A query reads the last ``window`` tokens up to its own; 0 is all. A row of a slot has ``fraction`` layers.
    """

    window: int = 0
    layers: tuple[KVSpec, ...] = ()
    fraction: int = 1


ONE_GROUP = (KVGroup(),)  # block tables of a model whose layers all read alike


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model and the bytes of a token in each slot's buffers, (K, V) or, of latent KV, one number.

    ``reason`` tells why layers with windows keep all tokens, or is empty.
    """

    groups: tuple[KVGroup, ...]
    slots: tuple[tuple[int, ...], ...]
    reason: str = ""

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def num_null(self) -> int:
        """The number of null blocks behind the blocks of the pool: 1 where blocks can be given back, else 0."""
        return int(any(self.windows))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block over all slots."""
        return block_size * sum(map(sum, self.slots))

    def num_bytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of a pool of ``num_blocks`` blocks, with the null block."""
        return (num_blocks + self.num_null) * self.block_bytes(block_size)

    def blocks_in(self, num_bytes: int, block_size: int) -> int:
        """The blocks in ``num_bytes``, beside the null block; 0 if none fits. A model without KV is refused.

        Raises:
            ZeroDivisionError: no layer has KV.
        """
        return max(0, num_bytes // self.block_bytes(block_size) - self.num_null)

    def buffers(self, num_blocks: int, block_size: int, zeros: Zeros[Memory]) -> list[tuple[Memory, ...]]:
        """Zeroed buffers [blocks + null, bytes of a row] uint8 of each slot, made by ``zeros``."""
        rows = num_blocks + self.num_null
        return [
            tuple(zeros((rows, block_size * token_bytes), "uint8") for token_bytes in slot)
            for slot in self.slots
        ]

    def pools(self, buffers: Sequence[tuple[Memory, ...]], block_size: int) -> dict[str, Memory]:
        """The pool of each layer by graph input: contiguous views of ``buffers``."""
        pools: dict[str, Memory] = {}
        for group in self.groups:
            for index, spec in enumerate(group.layers):
                slot, part = divmod(index, group.fraction)
                rows = zip(spec.inputs, buffers[slot], spec.row_shapes, strict=True)
                pools |= {name: view(raw, spec, row, block_size)[part:] for name, raw, row in rows}
        return pools

    def bytes_of(self, group: int, block_size: int) -> list[slice]:
        """The bytes of a block with the KV of ``group``, over all buffers in order; others belong to no layer."""
        owner, found, start = self.groups[group], list[slice](), 0
        for place, slot in enumerate(self.slots):
            layers = min(max(0, len(owner.layers) - place * owner.fraction), owner.fraction)
            for token_bytes in slot:
                row = block_size * token_bytes
                found += [slice(start, start + row * layers // owner.fraction)] * bool(layers)
                start += row
        return found

    @cached_property
    def group_of(self) -> dict[str, int]:
        """The number of the group of each pool, by graph input."""
        return {name: g for g, group in enumerate(self.groups) for s in group.layers for name in s.inputs}

    @cached_property
    def further_inputs(self) -> dict[str, str]:
        """The table inputs of all groups but the first, each with the input of the first group."""
        pairs = (zip(table_inputs(g), TABLE_INPUTS, strict=True) for g in range(1, len(self.groups)))
        return {name: base for group in pairs for name, base in group}


@cache
def table_inputs(group: int) -> tuple[str, ...]:
    """The graph inputs with slot mapping and block tables of the group with this number."""
    return tuple(f"{name}_{group}" if group else name for name in TABLE_INPUTS)


def with_tables(inputs: Mapping[str, T], further: Mapping[str, str]) -> Mapping[str, T]:
    """``inputs`` with the tables of the first group where tables of ``further_inputs`` are missing."""
    missing = {name: inputs[base] for name, base in further.items() if name not in inputs}
    return {**inputs, **missing} if missing else inputs


def view(buffer: Memory, spec: KVSpec, row: tuple[int, int], block_size: int) -> Memory:
    """``buffer`` as a pool [blocks, block_size, *row] of the type of ``spec``.

    NumPy has no bfloat16: such a pool of NumPy is uint16.
    """
    name, _ = KV_DTYPES[spec.dtype]
    dtype = numpy_dtype(name) if isinstance(buffer, np.ndarray) else torch_dtype(name)
    return buffer.view(dtype).reshape(-1, block_size, *row)  # type: ignore[arg-type]


def kv_layout(states: Iterable[StateSpec]) -> KVLayout:
    """The groups of a model's layers, by window."""
    states = tuple(states)
    kinds: dict[int, list[KVSpec]] = {}
    for spec in kv_of(states):
        kinds.setdefault(spec.window, []).append(spec)
    if recurrent_of(states):
        return one_group(states, reason=RECURRENT_REASON if any(kinds) else "")
    if len(kinds) <= 1:
        return one_group(states, next(iter(kinds), 0))
    return packed(kinds) or one_group(states, reason=UNLIKE_REASON)


def layout_of(states: Iterable[StateSpec], windows: tuple[int, ...]) -> KVLayout:
    """The layout with the groups ``windows``: that of ``kv_layout``, or a single group that keeps all tokens.

    Raises:
        ValueError: the model has no such groups.
    """
    states = tuple(states)
    found = next((each for each in (kv_layout(states), one_group(states)) if each.windows == windows), None)
    if found is None:
        raise ValueError(f"the model's layers have the windows {kv_layout(states).windows}, not {windows}")
    return found


def one_group(states: Iterable[StateSpec], window: int = 0, reason: str = "") -> KVLayout:
    """All layers in one group: each has a slot of its own."""
    specs = kv_of(states)
    return KVLayout((KVGroup(window, specs),), tuple(spec.row_bytes for spec in specs), reason)


def packed(kinds: dict[int, list[KVSpec]]) -> KVLayout | None:
    """The layers of several windows in a common pool; None where their bytes do not fit together."""
    sizes = {window: {spec.row_bytes for spec in specs} for window, specs in kinds.items()}
    if any(len(found) > 1 for found in sizes.values()):
        return None
    of = {window: found.pop() for window, found in sizes.items()}
    slot = max(of.values())
    fractions = {window: slot[0] // size[0] for window, size in of.items()}
    if any(tuple(fractions[window] * each for each in size) != slot for window, size in of.items()):
        return None
    rows = [-(-len(specs) // fractions[window]) for window, specs in kinds.items()]
    slots = min(range(1, max(rows) + 1), key=lambda count: (cost_of(rows, count), count))
    groups = []
    for window in sorted(kinds):
        specs, size = kinds[window], slots * fractions[window]
        pieces = (specs[at : at + size] for at in range(0, len(specs), size))
        groups += [KVGroup(window, tuple(piece), fractions[window]) for piece in pieces]
    return KVLayout(tuple(groups), (slot,) * slots)


def cost_of(rows: Sequence[int], slots: int) -> int:
    """Rows that stay empty and groups, with so many slots, for kinds of layers that take ``rows`` each."""
    groups = [-(-count // slots) for count in rows]
    return sum(groups) * slots - sum(rows) + sum(groups)

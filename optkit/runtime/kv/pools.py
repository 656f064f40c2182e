"""KV cache: the memory of the pools, and the number of blocks in a size.

Each attention layer has two pools, K [blocks, block_size, Hkv, D] and V [blocks, block_size, Hkv, Dv], of the dtype
of its spec (an int8 token takes four bytes more, for the scale; ``reference_attention`` has the layout of the bytes).
All layers of a group share the block numbers, and groups share the memory (``optkit.graph.kv_layout``). Pools are
allocated once, at start: the largest cost after the weights is known before the first request, and nothing grows while
serving.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from optkit.errors import UserError
from optkit.graph.kv_layout import KVLayout, Memory, Zeros
from optkit.graph.states import (
    KVSpec,
    StateSpec,
    host_zeros,
    kv_of,
    named_pools,
    recurrent_of,
    sequence_bytes,
    token_bytes,
)
from optkit.kernels.kv_rows import WORD
from optkit.runtime.draft_tree import Move
from optkit.runtime.info import MemoryPlan
from optkit.runtime.kv.windows import held_blocks
from optkit.runtime.types import BlockCopy, StateCopy

if TYPE_CHECKING:
    import torch

__all__ = [
    "HostPools",
    "Pools",
    "Step",
    "allocate",
    "allocated",
    "dtype_label",
    "memory_plan",
]

T = TypeVar("T")
# Takes the flattened token batch, gives the logits [L, V] float32.
Step = Callable[[Mapping[str, np.ndarray]], Any]


class Pools(Protocol):
    """The memory of the states of a model, on the host or on a device.

    Attributes:
        kv: the KV pool of each layer, by graph input.
        states: the pool of each recurrent state, by graph input.
        device: "cpu", or the kind of device.
    """

    device: str
    kv: dict[str, Any]
    states: dict[str, Any]

    def bind(self, model: Any) -> Step:
        """The step of ``model`` on these pools."""
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None: ...

    def move_tokens(self, moves: Sequence[Move]) -> None: ...

    def copy_block(self, copy: BlockCopy) -> None: ...

    def read_block(self, block: int) -> np.ndarray: ...

    def write_block(self, block: int, data: np.ndarray) -> None: ...


class HostPools:
    """Pools of NumPy in the memory of the CPU (``Pools``).

    Raises:
        UserError: the memory is too small, or the size is beyond any array's.
    """

    device = "cpu"

    def __init__(
        self,
        layout: KVLayout,
        states: Sequence[StateSpec],
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        sizes = (num_blocks, block_size, num_slots)
        rows = Rows(layout)
        self.buffers, self.kv, self.states = allocated(layout, states, *sizes, rows.zeros)
        self._blocks = rows.joined()
        self._tokens = [part for spec in kv_of(states) for part in token_views(spec, self.kv)]

    def bind(self, model: Any) -> Step:
        """The step of ``model`` on these pools; a model of torch gets tensors over the same memory."""
        pools = self.kv | self.states
        if (bound := getattr(model, "step_on", None)) is not None:
            step: Step = bound(pools)
            return step
        from optkit.runtime.torch_step import torch_step

        return torch_step(model, pools)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        for pool in self.states.values():
            for copy in copies:
                pool[copy.to] = pool[copy.source]

    def move_tokens(self, moves: Sequence[Move]) -> None:
        """Copy KV of tokens within their sequences. For models with one group of layers."""
        size = self.block_size
        for move in moves:
            for source, target in zip(move.sources, move.targets, strict=True):
                a, b = move.table[source // size], move.table[target // size]
                a_four, a_at, b_four, b_at = *divmod(source % size, WORD), *divmod(target % size, WORD)
                for rows, fours in self._tokens:
                    if fours:
                        rows[b, b_four, b_at] = rows[a, a_four, a_at]
                    else:
                        rows[b, target % size] = rows[a, source % size]

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy the KV of a block in all layers."""
        for buffers in self._blocks:
            buffers[:, copy.to] = buffers[:, copy.source]

    def read_block(self, block: int) -> np.ndarray:
        """The KV of ``block`` in the layers of its group, as bytes [n] uint8."""
        parts = [buffers[:, block].flatten() for buffers in self._blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write_block(self, block: int, data: np.ndarray) -> None:
        """Write the bytes of ``read_block`` into any block."""
        start = 0
        for buffers in self._blocks:
            count, _, size = buffers.shape
            end = start + count * size
            buffers[:, block] = data[start:end].reshape(count, size)
            start = end


class Rows:
    """Makes the buffers of ``layout``. A run of equal buffers shares an array, so copies of a block are few."""

    def __init__(self, layout: KVLayout) -> None:
        sizes = [size for slot in layout.slots for size in slot]
        self._runs = [len(list(run)) for _, run in itertools.groupby(sizes)]  # of equal buffers
        self._left = deque[np.ndarray]()  # buffers of the last run, not yet asked for
        self._made: list[np.ndarray] = []

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The next buffer of the layout, and after the last any zeros."""
        if not self._left and len(self._made) == len(self._runs):
            return host_zeros(shape, dtype)
        if not self._left:
            count = self._runs[len(self._made)]
            self._made.append(aligned_zeros(count, shape))
            self._left.extend(self._made[-1])
        return self._left.popleft()

    def joined(self) -> list[np.ndarray]:
        """The array [buffers, blocks, bytes] of each run, in the order of the layout."""
        return self._made


def aligned_zeros(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros [count, *shape] uint8; each of the ``count`` arrays begins with a page."""
    size = -(-prod(shape) // mmap.PAGESIZE) * mmap.PAGESIZE
    return host_zeros((count, size), "uint8")[:, : prod(shape)].reshape(count, *shape)


def token_views(spec: KVSpec, pools: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, bool]]:
    """Views of a layer's pools on the host, in which block and token index the bytes of a token.

    Arrays are [blocks, block_size, ...], or, marked by True, [blocks, block_size / 4, 4, ...].
    """
    found = [pools[name] for name in spec.inputs]
    size = found[0].shape[1]
    if not spec.is_interleaved(size):
        return [(pool, False) for pool in found]
    views: list[tuple[np.ndarray, bool]] = []
    for pool, dim, is_value in zip(found, spec.row_dims, (False, True), strict=True):
        heads = pool.reshape(len(pool), spec.num_kv_heads, -1)
        codes, scales = heads[..., : size * dim], heads[..., size * dim :].view(np.float32)
        views.append((scales.transpose(0, 2, 1), False))
        if is_value:
            fours = codes.reshape(*codes.shape[:2], size // WORD, dim, WORD)
            views.append((fours.transpose(0, 2, 4, 1, 3), True))
        else:
            words = codes.view(np.uint32).reshape(*codes.shape[:2], dim // WORD, size)
            views.append((words.transpose(0, 3, 1, 2), False))
    return views


def allocated(
    layout: KVLayout,
    states: Sequence[StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int,
    zeros: Zeros[Memory],
) -> tuple[list[tuple[Memory, ...]], dict[str, Memory], dict[str, Memory]]:
    """The buffers of a pool, and by graph input the KV pools over the buffers and the recurrent states.

    Raises:
        UserError: the memory is too small, or the size is beyond any array's.
    """
    buffers = within(
        lambda: layout.buffers(num_blocks, block_size, zeros), layout.num_bytes(num_blocks, block_size), 0
    )
    slots = within(
        lambda: {name: zeros(*kind) for name, kind in slot_pools(states, num_slots).items()},
        0,
        num_slots * sequence_bytes(states),
    )
    return buffers, layout.pools(buffers, block_size), slots


def slot_pools(states: Sequence[StateSpec], num_slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the pool of each recurrent state, by graph input."""
    return {spec.inputs[0]: ((num_slots, *spec.shape), spec.dtype) for spec in recurrent_of(states)}


def allocate(
    states: Sequence[StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Zeroed pools of torch by graph input, without shared memory.

    On Linux the pages cost memory after the first write.

    Raises:
        UserError: the memory is too small, or the size is beyond any tensor's.
    """
    size = num_blocks * block_size * token_bytes(kv_of(states))
    return within(
        lambda: named_pools(states, num_blocks, block_size, num_slots, device),
        size,
        num_slots * sequence_bytes(states),
    )


def within(make: Callable[[], T], kv_bytes: int, state_bytes: int) -> T:
    """The result of ``make()``, an allocation of so many bytes.

    Raises:
        UserError: the memory is too small, or the size is beyond any tensor's.
    """
    try:
        return make()
    except (OSError, ValueError, OverflowError, MemoryError, RuntimeError) as error:  # of mmap, torch
        parts = [f"{kv_bytes:,} bytes of KV cache"] * bool(kv_bytes)
        parts += [f"{state_bytes:,} bytes of recurrent states"] * bool(state_bytes)
        raise UserError(
            f"{' and '.join(parts)} can't be had",
            where="kv_cache_bytes",
            fix=f"lower --kv-cache-bytes{' or --max-num-seqs' * bool(state_bytes)}",
        ) from error


def dtype_label(specs: Sequence[KVSpec]) -> str:
    """The element type of the pools, in words: "int8", "float32 and int8" for mixed layers, or "no type"."""
    return " and ".join(sorted({spec.dtype for spec in specs})) or "no type"


def memory_plan(
    num_blocks: int,
    block_size: int,
    num_bytes: int,
    sequence_length: int,
    dtype: str,
    windows: Sequence[int] = (0,),
) -> MemoryPlan:
    """The memory plan of a pool: requests of ``sequence_length`` tokens in ``num_blocks`` blocks at once.

    With ``windows`` the tokens of the pool are those of such requests.
    """
    held = held_blocks(windows, sequence_length, block_size)
    tokens = num_blocks * sequence_length // held if any(windows) else num_blocks * block_size
    return MemoryPlan(
        num_blocks=num_blocks,
        num_tokens=tokens,
        num_bytes=num_bytes,
        sequence_length=sequence_length,
        num_sequences=num_blocks // held,
        dtype=dtype,
    )

"""KV cache: the memory of the pools, and the number of blocks in a size.

Each attention layer has two pools, K [blocks, block_size, Hkv, D] and V [blocks, block_size, Hkv, Dv], of the dtype
of its spec (an int8 row is four bytes longer, for the scale). All layers of a group share the block numbers, and groups
share the memory (``optkit.graph.kv_layout``). Pools are allocated once, at start: the largest cost after the weights is
known before the first request, and nothing grows while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from optkit.errors import UserError
from optkit.graph.kv_layout import KVLayout
from optkit.graph.states import (
    KVSpec,
    RecurrentSpec,
    StateSpec,
    kv_of,
    named_pools,
    sequence_bytes,
    token_bytes,
)
from optkit.runtime.info import MemoryPlan
from optkit.runtime.kv.windows import held_blocks

__all__ = [
    "allocate",
    "allocate_buffers",
    "allocate_states",
    "dtype_label",
    "memory_plan",
]

T = TypeVar("T")
Buffers = list[tuple[torch.Tensor, ...]]


def allocate(
    states: Sequence[StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Zeroed pools by graph input, each with memory of its own. (On Linux the pages cost memory after the first write.)

    Raises:
        UserError: the memory is too small, or the size is beyond any tensor's.
    """
    size = num_blocks * block_size * token_bytes(kv_of(states))
    return within(
        lambda: named_pools(states, num_blocks, block_size, num_slots, device),
        size,
        num_slots * sequence_bytes(states),
    )


def allocate_buffers(
    layout: KVLayout, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> Buffers:
    """The buffers of a pool of ``num_blocks`` blocks. Raises as ``allocate``."""
    size = layout.num_bytes(num_blocks, block_size)
    return within(lambda: layout.buffers(num_blocks, block_size, device), size, 0)


def allocate_states(
    states: Sequence[RecurrentSpec], num_slots: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Zeroed pools of recurrent states by graph input. Raises as ``allocate``."""
    return within(lambda: named_pools(states, 0, 1, num_slots, device), 0, num_slots * sequence_bytes(states))


def within(make: Callable[[], T], kv_bytes: int, state_bytes: int) -> T:
    """The result of ``make()``, which allocates so many bytes.

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

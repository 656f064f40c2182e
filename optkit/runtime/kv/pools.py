"""KV cache: the memory of the pools, and the number of blocks in a size.

Each attention layer has two pools, K [blocks, block_size, Hkv, D] and V [blocks, block_size, Hkv, Dv], of the dtype
of its spec (an int8 row is four bytes longer, for the scale). All layers share the block numbers, so a block of KV
is a row in *every* pool. Pools are allocated once, at start: the largest cost after the weights is known before the
first request, and nothing grows while serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.errors import UserError
from optkit.graph.states import KVSpec, StateSpec, kv_of, named_pools, sequence_bytes
from optkit.runtime.info import MemoryPlan

__all__ = [
    "allocate",
    "block_bytes",
    "blocks_for_bytes",
    "dtype_label",
    "memory_plan",
]


def allocate(
    states: Sequence[StateSpec],
    num_blocks: int,
    block_size: int,
    num_slots: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Zeroed pools by graph input. (On Linux the pages cost memory after the first write.)

    Raises:
        UserError: the memory is too small, or the size is beyond any tensor's.
    """
    try:
        return named_pools(states, num_blocks, block_size, num_slots, device)
    except (OSError, ValueError, OverflowError, MemoryError, RuntimeError) as error:  # of mmap, torch
        size = num_blocks * block_bytes(kv_of(states), block_size)
        slots = num_slots * sequence_bytes(states)
        raise UserError(
            f"{size:,} bytes of KV cache{f' and {slots:,} of recurrent states' * bool(slots)} can't be had",
            where="kv_cache_bytes",
            fix=f"lower --kv-cache-bytes{' or --max-num-seqs' * bool(slots)}",
        ) from error


def block_bytes(specs: Sequence[KVSpec], block_size: int) -> int:
    """Bytes of a block over all layers."""
    return block_size * sum(spec.token_bytes for spec in specs)


def blocks_for_bytes(specs: Sequence[KVSpec], block_size: int, num_bytes: int) -> int:
    """The number of blocks in ``num_bytes``; 0 if no block fits."""
    return num_bytes // block_bytes(specs, block_size)


def dtype_label(specs: Sequence[KVSpec]) -> str:
    """The element type of the pools, in words: "int8", "float32 and int8" for mixed layers, or "no type"."""
    return " and ".join(sorted({spec.dtype for spec in specs})) or "no type"


def memory_plan(
    num_blocks: int, block_size: int, num_bytes: int, sequence_length: int, dtype: str
) -> MemoryPlan:
    """The memory plan of a pool: requests of ``sequence_length`` tokens in ``num_blocks`` blocks at once."""
    return MemoryPlan(
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        num_bytes=num_bytes,
        sequence_length=sequence_length,
        num_sequences=num_blocks // -(-sequence_length // block_size),
        dtype=dtype,
    )

"""KV cache: the memory of the pools, and how much of it a machine can afford.

Each attention layer has two pools, K [blocks, block_size, Hkv, D] and V [blocks, block_size, Hkv, Dv]. All layers
share one block numbering, so a block of KV is one row in *every* pool. Pools are allocated once, at
start: the largest cost after the weights is known before the first request, and nothing grows while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optkit.graph.ir import KVSpec

__all__ = ["KVSpec", "MemoryPlan", "allocate", "block_bytes", "blocks_for_bytes", "memory_plan"]


@dataclass(frozen=True)
class MemoryPlan:
    """What a KV pool costs and holds. ``num_sequences`` of ``sequence_length`` tokens fit at once."""

    num_blocks: int
    num_tokens: int
    num_bytes: int
    sequence_length: int
    num_sequences: int


def allocate(
    specs: Sequence[KVSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zeroed pools, one K and one V per spec. (On Linux the pages cost memory when first written.)"""

    def pool(spec: KVSpec, head_dim: int) -> torch.Tensor:
        return torch.zeros(num_blocks, block_size, spec.num_kv_heads, head_dim, dtype=dtype, device=device)

    return [pool(s, s.head_dim) for s in specs], [pool(s, s.v_head_dim) for s in specs]


def block_bytes(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) for spec in specs)
    return per_token * block_size * dtype.itemsize


def blocks_for_bytes(
    specs: Sequence[KVSpec], block_size: int, num_bytes: int, dtype: torch.dtype = torch.float32
) -> int:
    """How many blocks fit into ``num_bytes``; 0 if not even one does."""
    return num_bytes // block_bytes(specs, block_size, dtype)


def memory_plan(num_blocks: int, block_size: int, num_bytes: int, sequence_length: int) -> MemoryPlan:
    """How many sequences of ``sequence_length`` tokens a pool of ``num_blocks`` blocks holds at once."""
    return MemoryPlan(
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        num_bytes=num_bytes,
        sequence_length=sequence_length,
        num_sequences=num_blocks // -(-sequence_length // block_size),
    )

"""Chunked prefill and decode of several sequences through scattered KV blocks, in a ragged batch per step."""

from __future__ import annotations

import torch

from optkit.graph.states import STATE_SLOTS, named_pools
from optkit.lowering.lower import Executable

BLOCK = 4


def ragged_logits(model: Executable, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of every position of every prompt, computed in uneven chunks and single tokens.

    Block tables interleave (sequence i owns blocks i, i + n, i + 2n, ...), so no sequence is contiguous.
    """
    blocks = -(-max(len(p) for p in prompts) // BLOCK)
    tables = torch.tensor([[i + j * len(prompts) for j in range(blocks)] for i in range(len(prompts))])
    caches = state_pools(model, blocks * len(prompts), len(prompts))
    done = [0] * len(prompts)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    step = 0
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        take = [min(1 if (step + i) % 3 == 0 else 5 + i, len(p) - done[i]) for i, p in enumerate(prompts)]
        active = [i for i, n in enumerate(take) if n > 0]
        logits = model(batch_inputs(prompts, tables, done, take, active) | caches)
        for i, rows in zip(active, logits.split([take[i] for i in active]), strict=True):
            out[i].append(rows)
            done[i] += take[i]
        step += 1
    return [torch.cat(pieces) for pieces in out]


def state_pools(model: Executable, blocks: int, sequences: int) -> dict[str, torch.Tensor]:
    """Pools full of NaN: a read of an unwritten slot shows in the logits."""
    pools = named_pools(model.states, blocks, BLOCK, sequences)
    for pool in pools.values():
        pool.view(torch.uint8).fill_(255)  # NaN as a float32, and as the scale of an int8 row
    return pools


def batch_inputs(prompts, tables, done, take, active) -> dict[str, torch.Tensor]:
    positions = [torch.arange(done[i], done[i] + take[i]) for i in active]
    slots = [tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in zip(active, positions, strict=True)]
    counts = torch.tensor([0] + [take[i] for i in active])
    return {
        "input_ids": torch.cat([prompts[i][p] for i, p in zip(active, positions, strict=True)]),
        "positions": torch.cat(positions),
        "slot_mapping": torch.cat(slots),
        "query_start": counts.cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor([done[i] + take[i] for i in active], dtype=torch.int32),
        "block_tables": tables[active].to(torch.int32),
        "logits_index": torch.arange(int(counts.sum())),
        STATE_SLOTS: torch.tensor([len(prompts) - 1 - i for i in active], dtype=torch.int32),
    }

"""Batch inputs for runs of a graph on whole sequences, with pools of the exact size, for checks and calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.graph.states import STATE_SLOTS, StateSpec, named_pools, recurrent_of


def dense_inputs(
    lengths: Sequence[int], ids: Tensor, states: Sequence[StateSpec], block_size: int = 16
) -> dict[str, Tensor]:
    """Batch inputs for sequences of ``lengths`` in a call, with logits for every row."""
    blocks = [-(-n // block_size) for n in lengths]
    first = torch.tensor([0, *blocks]).cumsum(0)
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, (start, count) in enumerate(zip(first.tolist(), blocks, strict=False)):
        tables[row, :count] = torch.arange(start, start + count)
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.cat([first[i] * block_size + torch.arange(n) for i, n in enumerate(lengths)])
    inputs = {
        "input_ids": ids,
        "positions": positions,
        "slot_mapping": starts,
        "query_start": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_tables": tables,
        "logits_index": torch.arange(len(ids)),
    }
    if recurrent_of(states):
        inputs[STATE_SLOTS] = torch.arange(len(lengths), dtype=torch.int32)
    return inputs | named_pools(states, sum(blocks), block_size, len(lengths))

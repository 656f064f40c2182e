"""A forgetful runtime: attention to the first and the last blocks of a sequence, as after evicting the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.runtime.logits import Model, RuntimeLogits

CHUNK = (
    64  # new tokens in a call: how far the window of a chunk's first tokens reaches beyond that of its last
)


class EvictingLogits(RuntimeLogits):
    """Logits with the KV of the first block and of the last ``window`` tokens before a chunk; positions stay.

    The first block holds the sinks without which a model of full attention writes noise. Blocks between are in no
    table, so no kernel reads them.
    """

    def __init__(self, model: Model, window: int, block_size: int = 16) -> None:
        super().__init__(model, block_size, chunk=CHUNK, long_chunk=CHUNK)
        self.window = window

    def _inputs(
        self,
        sequences: list[Tensor],
        tables: Tensor,
        done: list[int],
        take: dict[int, int],
        prompts: Sequence[int],
    ) -> dict[str, Any]:
        inputs = super()._inputs(sequences, tables, done, take, prompts)
        kept = []
        lengths = []
        for i, count in take.items():
            gone = max(0, (done[i] - self.window) // self.block_size - 1)  # blocks behind the first
            kept.append(torch.cat([tables[i][:1], tables[i][1 + gone :]]).to(torch.int32))
            lengths.append(done[i] + count - gone * self.block_size)
        width = max(map(len, kept))
        inputs["block_tables"] = torch.stack(
            [torch.cat([table, table.new_zeros(width - len(table))]) for table in kept]
        )
        inputs["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
        return inputs

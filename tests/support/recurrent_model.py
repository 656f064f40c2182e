"""A model with a recurrent state and paged keys, or the state alone, in plain torch, by the rules of state slots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.graph.states import KVSpec, RecurrentSpec

VOCAB, WIDTH = 32, 8
STATES = [RecurrentSpec(0, "recurrent_state", (WIDTH, WIDTH)), RecurrentSpec(0, "conv_state", (WIDTH, 2))]


class RecurrentModel:
    """``h = decay * h + x outer x`` per token and a sum of the last three tokens; with ``hybrid`` also the mean of all
    earlier rows in a KV pool. A state of another sequence, or one token too many, changes the logits.
    """

    weight_bytes, vocab_size, max_model_len, variant_limits = 0, VOCAB, 96, ()
    device = torch.device("cpu")

    def __init__(self, hybrid: bool = True) -> None:
        self.kv_specs = [KVSpec(1, 1, WIDTH, WIDTH)] if hybrid else []
        self.states = [*STATES, *self.kv_specs]
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.head = torch.randn(3 * WIDTH, VOCAB, generator=generator)
        self.num_tokens: list[int] = []

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        return 0

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        x, starts = self.embedding[inputs["input_ids"]], inputs["query_start"].tolist()
        self.num_tokens.append(len(x))
        out = torch.zeros(len(x), 3 * WIDTH)
        for s, slot in enumerate(inputs["state_slots"].tolist()):
            rows = slice(starts[s], starts[s + 1])
            out[rows, : 2 * WIDTH] = self.recur(x[rows], slot, int(inputs["seq_lens"][s]), inputs)
            if self.kv_specs:
                out[rows, 2 * WIDTH :] = self.mean_before(x[rows], s, rows, inputs)
        return (out @ self.head)[inputs["logits_index"]]

    def recur(self, x: Tensor, slot: int, length: int, inputs: Mapping[str, Tensor]) -> Tensor:
        h, last = inputs["recurrent_state_0"][slot], inputs["conv_state_0"][slot]
        if length == len(x):
            h.zero_()
            last.zero_()
        rows = []
        for row in x:
            h.mul_(0.9).add_(torch.outer(row, row))
            rows.append(torch.cat([h @ row, last.sum(1) + row]))
            last.copy_(torch.cat([last[:, 1:], row[:, None]], 1))
        return torch.stack(rows)

    def mean_before(self, x: Tensor, s: int, rows: slice, inputs: Mapping[str, Tensor]) -> Tensor:
        pool, table = inputs["k_cache_1"], inputs["block_tables"][s].long()
        pool.view(-1, WIDTH)[inputs["slot_mapping"][rows]] = x
        known = pool[table].flatten(0, 2)[: int(inputs["seq_lens"][s])]
        sums = known.cumsum(0) / torch.arange(1, len(known) + 1)[:, None]
        return sums[inputs["positions"][rows]]

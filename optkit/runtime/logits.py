"""Logits of whole windows through an executable, computed as a server computes them.

Two windows share a batch, unless the caller asks for one. Their chunks have different lengths, so the batch is ragged
and no chunk ends where a block does. Their KV blocks interleave. The last ``decode`` tokens of each window run in
single steps. So prefill kernels, decode kernels and block tables all take part. Pools are reused from pair to pair
without clearing: a kernel that reads a wrong slot sees stale data, as in a server.

Long contexts need few rows: ``rows`` gives those at some positions of a window, ``branches`` those of several
continuations of one context, whose KV is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from optkit.graph.states import STATE_SLOTS, recurrent_of
from optkit.runtime.kv.pools import allocate

SEQUENCES = 2  # in a batch
LONG_CHUNK = 512


class Model(Protocol):
    """The used part of ``optkit.lowering.lower.Executable``."""

    states: Any
    vocab_size: int
    max_model_len: int

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor: ...


class RuntimeLogits:
    """A ``LogitsSource`` over an executable.

    Args:
        model: called with the inputs of docs/architecture.md, returns logits [L, V].
        block_size: tokens in a KV block.
        chunk: new tokens of a sequence in a call; fewer for the second sequence.
        decode: tokens at the end of each window, run in single steps.
        long_chunk: new tokens in a call of ``rows`` and ``branches``, where one sequence runs alone.
        together: windows in a batch, at most ``SEQUENCES``.
    """

    def __init__(
        self,
        model: Model,
        block_size: int = 16,
        chunk: int = 128,
        decode: int = 8,
        long_chunk: int = LONG_CHUNK,
        together: int = SEQUENCES,
    ) -> None:
        self.long_chunk, self.together = long_chunk, together
        self.model, self.block_size, self.chunk, self.decode = model, block_size, chunk, decode
        self.device = getattr(model, "device", torch.device("cpu"))
        self._pools: tuple[int, dict[str, Tensor]] = (0, {})

    @property
    def max_length(self) -> int:
        """Tokens of the longest window within the model's positions."""
        return self.model.max_model_len

    def logits(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        for first in range(0, len(windows), self.together):
            outputs = self._run([torch.tensor(window) for window in windows[first : first + self.together]])
            while outputs:  # the caller frees each window's logits before the next window
                yield outputs.pop(0)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """``count`` tokens after each prompt, each the most likely one; prefill in chunks, then single steps."""
        found: list[list[int]] = []
        for first in range(0, len(prompts), SEQUENCES):
            pair = [torch.tensor([*prompt, *[0] * count]) for prompt in prompts[first : first + SEQUENCES]]
            self._continue(pair, [len(sequence) - count for sequence in pair])
            found += [sequence[-count:].tolist() for sequence in pair]
        return found

    def rows(self, window: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [len(positions), V] at ascending ``positions`` of a window."""
        sequence = torch.tensor(window)
        tables = self._block_tables([sequence])
        caches = self._caches(tables.numel())
        return self._chunks(sequence, tables, caches, 0, self.long_chunk, positions)

    def branches(
        self, context: Sequence[int], branches: Sequence[tuple[Sequence[int], int]]
    ) -> Iterator[Tensor]:
        """Logits [count, V] at the last ``count`` tokens of each branch, a pair (tokens, count) behind ``context``.

        The context and the first tokens of a branch run in chunks, the last ``count`` tokens of a branch in single
        steps, as a server decodes. Each branch overwrites the KV of the one before.
        """
        longest = max((len(tokens) for tokens, _ in branches), default=0)
        sequence = torch.tensor([*context, *[0] * longest])
        tables = self._block_tables([sequence])
        caches = self._caches(tables.numel())
        self._chunks(sequence[: len(context)], tables, caches, 0, self.long_chunk, ())
        recurrent = [name for spec in recurrent_of(self.model.states) for name in spec.inputs]
        kept = {name: caches[name].clone() for name in recurrent}
        for tokens, count in branches:
            for name, state in kept.items():
                caches[name].copy_(state)
            end = len(context) + len(tokens)
            sequence[len(context) : end] = torch.tensor(tokens)
            first = max(len(context), end - count)
            self._chunks(sequence[:first], tables, caches, len(context), self.long_chunk, ())
            yield self._chunks(sequence[:end], tables, caches, first, 1, range(first, end))

    def _chunks(
        self,
        sequence: Tensor,
        tables: Tensor,
        caches: dict[str, Tensor],
        done: int,
        chunk: int,
        positions: Sequence[int],
    ) -> Tensor:
        """Run ``sequence`` from token ``done`` on; the logits [len(positions), V] at ``positions``."""
        found = torch.empty(len(positions), self.model.vocab_size)
        filled = 0
        while done < len(sequence):
            take = min(chunk, len(sequence) - done)
            inputs = self._inputs([sequence], tables, [done], {0: take})
            wanted = [position - done for position in positions if done <= position < done + take]
            inputs["logits_index"] = torch.tensor(wanted or [take - 1])
            rows = self._call(caches, inputs)
            if wanted:
                found[filled : filled + len(wanted)] = rows
            filled, done = filled + len(wanted), done + take
        return found

    def _call(self, caches: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        rows: Tensor = self.model({name: value.to(self.device) for name, value in inputs.items()} | caches)
        return rows

    def _continue(self, sequences: list[Tensor], known: list[int]) -> None:
        """Write a token behind the ``known`` ones of each sequence, again and again until all are full."""
        tables = self._block_tables(sequences)
        caches = self._caches(tables.numel())
        done = [0] * len(sequences)
        while open_ones := [i for i, tokens in enumerate(sequences) if known[i] < len(tokens)]:
            take = {i: min(known[i] - done[i], max(1, self.chunk - 11 * i)) for i in open_ones}
            rows = self._call(caches, self._inputs(sequences, tables, done, take))
            for i, piece in zip(take, rows.split(list(take.values())), strict=True):
                done[i] += take[i]
                if done[i] == known[i]:
                    sequences[i][known[i]] = piece[-1].argmax()
                    known[i] += 1

    def _run(self, sequences: list[Tensor]) -> list[Tensor]:
        tables = self._block_tables(sequences)
        caches = self._caches(tables.numel())
        lengths, done = [len(tokens) for tokens in sequences], [0] * len(sequences)
        outputs: list[Tensor] = []
        while take := self._take(sequences, done):
            rows = self._call(caches, self._inputs(sequences, tables, done, take))
            if [len(rows)] == lengths:  # a window in a single call: its logits, 100 MB, are not copied
                return [rows.cpu()]
            outputs = outputs or [torch.empty(length, self.model.vocab_size) for length in lengths]
            counts = list(take.values())
            for i, piece in zip(take, rows.split(counts), strict=True):
                outputs[i][done[i] : done[i] + take[i]] = piece
                done[i] += take[i]
        return outputs

    def _take(self, sequences: list[Tensor], done: list[int]) -> dict[int, int]:
        """{sequence: new tokens of the call}; finished sequences are left out."""
        take = {}
        for i, tokens in enumerate(sequences):
            left = len(tokens) - done[i]
            prefill = min(left - self.decode, max(1, self.chunk - 11 * i))
            if left:
                take[i] = max(1, prefill)
        return take

    def _block_tables(self, sequences: list[Tensor]) -> Tensor:
        """[S, B]: sequence i of n owns blocks i, i + n, i + 2n, ..."""
        blocks = -(-max(len(tokens) for tokens in sequences) // self.block_size)
        return torch.arange(blocks * len(sequences)).view(blocks, -1).T.contiguous()

    def _caches(self, blocks: int) -> dict[str, Tensor]:
        if self._pools[0] < blocks:
            states = self.model.states
            self._pools = (blocks, allocate(states, blocks, self.block_size, SEQUENCES, self.device))
        return self._pools[1]

    def _inputs(
        self, sequences: list[Tensor], tables: Tensor, done: list[int], take: dict[int, int]
    ) -> dict[str, Tensor]:
        positions = [torch.arange(done[i], done[i] + n) for i, n in take.items()]
        slots = [self._slots(tables[i], where) for i, where in zip(take, positions, strict=True)]
        counts = torch.tensor([0, *take.values()])
        return {
            "input_ids": torch.cat([sequences[i][where] for i, where in zip(take, positions, strict=True)]),
            "positions": torch.cat(positions),
            "slot_mapping": torch.cat(slots),
            "query_start": counts.cumsum(0).to(torch.int32),
            "seq_lens": torch.tensor([done[i] + n for i, n in take.items()], dtype=torch.int32),
            "block_tables": tables[list(take)].to(torch.int32),
            "logits_index": torch.arange(int(counts.sum())),
            STATE_SLOTS: torch.tensor([SEQUENCES - 1 - i for i in take], dtype=torch.int32),
        }

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

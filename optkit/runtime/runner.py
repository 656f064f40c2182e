"""ModelRunner: a scheduled batch becomes the flattened token batch, and the executable runs it.

docs/architecture.md lists the inputs. numpy computes the inputs of all requests at once, because Python code per token
would be a visible part of a prefill. Steps of a token a request, which decode, take another way: a few numbers are
collected in Python in a third of the time of two dozen numpy calls. torch takes the arrays without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from optkit.graph.kv_layout import ONE_GROUP, KVGroup, KVLayout, one_group, table_inputs
from optkit.graph.states import (
    PROMPT_LENS,
    STATE_SLOTS,
    KVSpec,
    StateSpec,
    has_bounds,
    recurrent_of,
    sequence_bytes,
)
from optkit.runtime.draft_tree import DraftTree, Move
from optkit.runtime.kv.pools import allocate_buffers, allocate_states, dtype_label
from optkit.runtime.kv.windows import first_block
from optkit.runtime.types import Batch, BlockCopy, Request, ScheduledRequest, StateCopy


class ServableModel(Protocol):
    """A lowered graph (``optkit.lowering.lower.Executable``)."""

    @property
    def states(self) -> Sequence[StateSpec]: ...

    @property
    def kv_specs(self) -> Sequence[KVSpec]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int: ...

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


class ModelRunner:
    """Run batches on ``model`` with a KV pool of ``num_blocks`` blocks on the device of the model's weights.

    Args:
        num_slots: recurrent states that are kept, of sequences and checkpoints; unused by models without.
        layout: the groups of layers with block tables of their own; None is one group, which keeps all tokens.
    """

    num_ranks = 1

    def __init__(
        self,
        model: ServableModel,
        num_blocks: int,
        block_size: int,
        device: torch.device | str | None = None,
        num_slots: int = 0,
        layout: KVLayout | None = None,
    ) -> None:
        where: torch.device | str = getattr(model, "device", "cpu") if device is None else device
        self.model, self.device = model, torch.device(where)
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, model.vocab_size
        self.layout = layout or one_group(model.states)
        self.kv_windows, self.kv_bytes = self.layout.windows, self.layout.num_bytes(num_blocks, block_size)
        self.kv_dtype = dtype_label(model.kv_specs)
        self.weight_bytes, self.workspace_bytes = model.weight_bytes, model.workspace_bytes
        self.num_slots = num_slots if sequence_bytes(model.states) else 0
        self.has_bounds = has_bounds(model.states)
        self.state_bytes = self.num_slots * sequence_bytes(model.states)
        self._buffers = allocate_buffers(self.layout, num_blocks, block_size, self.device)
        self.kv_pools = self.layout.pools(self._buffers, block_size)
        flat = [buffer for pair in self._buffers for buffer in pair]
        self._block_rows = (
            [buffer.numpy() for buffer in flat] if self.device.type == "cpu" else []
        )  # of blocks
        self._token_rows = [rows.reshape(len(rows) * block_size, -1) for rows in self._block_rows]
        self.state_pools = allocate_states(recurrent_of(model.states), self.num_slots, self.device)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] float32, in batch order."""
        batch = with_sinks(batch)
        arrays = self.batch_inputs(batch)
        if self.num_slots:
            arrays[STATE_SLOTS] = state_slots(batch, self.num_slots)
        count = len(arrays["logits_index"])
        if count == 0:  # kernels need not handle zero rows: compute one and drop it
            arrays["logits_index"] = np.array([batch.num_tokens - 1], dtype=np.int64)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.device.type != "cpu":
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self.run(inputs)[:count]

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of a step with the batch ``inputs``."""
        return self.model(inputs | self.kv_pools | self.state_pools)

    def batch_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """The flattened token batch, with the block tables of each group of layers."""
        arrays = batch_inputs(batch, self.block_size, self.layout.groups, self.num_blocks)
        if self.has_bounds:
            arrays[PROMPT_LENS] = np.array([item.request.num_prompt for item in batch.items], np.int32)
        return arrays

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        for pool in self.state_pools.values():
            for copy in copies:
                pool[copy.to].copy_(pool[copy.source])

    def move_tokens(self, moves: Sequence[Move]) -> None:
        """Copy KV of tokens within their sequences. For models with one group of layers, on the CPU."""
        size = self.block_size
        for move in moves:
            pairs = [
                (move.table[at // size] * size + at % size for at in places)
                for places in (move.sources, move.targets)
            ]
            for source, target in zip(*pairs, strict=True):
                for rows in self._token_rows:
                    rows[target] = rows[source]

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy the KV of a block in all layers, after the steps before."""
        for pair in self._buffers:
            for buffer in pair:
                buffer[copy.to].copy_(buffer[copy.source])

    def read_block(self, block: int) -> np.ndarray:
        """The KV of ``block`` in the layers of its group, as bytes [n] uint8 on the host."""
        if self._block_rows:
            return np.concatenate([rows[block] for rows in self._block_rows])
        return torch.cat(self._bytes_of(block)).cpu().numpy()

    def write_block(self, block: int, data: np.ndarray) -> None:
        """Write the bytes of ``read_block`` into any block."""
        start = 0
        for each in self._block_rows:
            each[block] = data[start : start + each.shape[1]]
            start += each.shape[1]
        if self._block_rows:
            return
        rows = self._bytes_of(block)
        parts = torch.tensor(data, device=self.device).split([row.numel() for row in rows])
        for row, part in zip(rows, parts, strict=True):
            row.copy_(part)

    def _bytes_of(self, block: int) -> list[torch.Tensor]:
        """The bytes of ``block`` in each buffer, as views."""
        return [buffer[block] for pair in self._buffers for buffer in pair]


def with_sinks(batch: Batch) -> Batch:
    """``batch`` with the sinks of each item as a sequence of their own before the item (``optkit.runtime.kv.rolling``).

    Kernels store the keys and values of all sequences of a call before they attend.
    """
    if not any(item.sinks for item in batch.items):
        return batch
    items: list[ScheduledRequest] = []
    for item in batch.items:
        items += [sinks_of(item), replace(item, sinks=())] if item.sinks else [item]
    return replace(batch, items=tuple(items))


def sinks_of(item: ScheduledRequest) -> ScheduledRequest:
    """The sinks of ``item`` as a sequence at the first positions that are not forgotten, without logits."""
    request = item.request
    sequence = Request(
        request.received,
        [*item.sinks, request.token_ids[0]],  # a token more, so that none is the last
        block_tables=[table[:1] for table in request.block_tables],
        first_blocks=[0],
        position_shift=request.num_forgotten,
    )
    return ScheduledRequest(sequence, len(item.sinks))


def state_slots(batch: Batch, num_slots: int) -> np.ndarray:
    """The slot of each sequence: [S] int32. Native kernels take the numbers for addresses, so they are checked here.

    Raises:
        ValueError: a slot does not exist, or two sequences have one.
    """
    slots = [item.request.state_slot for item in batch.items]
    if not (min(slots) >= 0 and max(slots) < num_slots and len(set(slots)) == len(slots)):
        raise ValueError(f"state slots {slots!s:.200} are no {len(slots)} different ones of {num_slots}")
    return np.array(slots, dtype=np.int32)


def batch_inputs(
    batch: Batch, block_size: int, groups: Sequence[KVGroup] = ONE_GROUP, null: int = 0
) -> dict[str, np.ndarray]:
    """The flattened token batch of docs/architecture.md, without the KV pools.

    Args:
        groups: the groups of layers with block tables of their own.
        null: the null block, which stands in the place of blocks before the window.
    """
    make = decode_inputs if all(item.num_new == 1 for item in batch.items) else chunk_inputs
    return make(batch, block_size, groups, null)


def chunk_inputs(
    batch: Batch, block_size: int, groups: Sequence[KVGroup] = ONE_GROUP, null: int = 0
) -> dict[str, np.ndarray]:
    """``batch_inputs`` of a batch with any number of tokens of each request."""
    items = batch.items
    starts = np.array([item.request.num_held for item in items], dtype=np.int64)  # [S]
    counts = np.array([item.num_new for item in items], dtype=np.int64)  # [S]
    query_start = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    rows = np.repeat(np.arange(len(items)), counts)  # [T]
    places = np.arange(query_start[-1]) + (starts - query_start[:-1])[rows]  # [T]
    shifts = np.array([item.request.position_shift + item.request.num_forgotten for item in items])  # [S]
    inputs: dict[str, np.ndarray] = {
        "input_ids": new_tokens(batch),
        "positions": with_depths(batch, token_positions(batch, places + shifts[rows])),
        "query_start": query_start.astype(np.int32),
        "seq_lens": (starts + counts).astype(np.int32),
        "logits_index": last_rows(query_start[1:], np.array([item.num_logits for item in items])),
    }
    for number, group in enumerate(groups):
        tables = block_tables(batch, block_size, number, group, null)
        slots = tables[rows, places // block_size].astype(np.int64) * block_size + places % block_size
        inputs |= zip(table_inputs(number), (slots, tables), strict=True)
    return inputs


def with_depths(batch: Batch, positions: np.ndarray) -> np.ndarray:
    """The positions of tokens in their sequences, from their places in the cache: nodes of a tree share positions."""
    trees = [item for item in batch.items if isinstance(item.draft, DraftTree)]
    if not trees:
        return positions
    found, start = positions.copy(), 0
    for item in batch.items:
        start += item.num_new
        if isinstance(item.draft, DraftTree):
            count = len(item.draft)
            found[start - count : start] = positions[start - count - 1] + np.array(item.draft.depths)
    return found


def decode_inputs(
    batch: Batch, block_size: int, groups: Sequence[KVGroup] = ONE_GROUP, null: int = 0
) -> dict[str, np.ndarray]:
    """``batch_inputs`` of a batch with one token of each request."""
    requests = [item.request for item in batch.items]
    places = [request.num_held for request in requests]
    positions = [request.num_computed + request.position_shift for request in requests]
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.array([request.token_ids[request.num_computed] for request in requests], np.int64),
        "positions": token_positions(batch, np.array(positions, np.int64)),
        "query_start": np.arange(len(requests) + 1, dtype=np.int32),
        "seq_lens": np.array([at + 1 for at in places], np.int32),
        "logits_index": np.array([i for i, item in enumerate(batch.items) if item.num_logits], np.int64),
    }
    for number, group in enumerate(groups):
        tables = block_tables(batch, block_size, number, group, null)
        room = group.fraction * block_size
        slots = [
            r.block_tables[number][at // block_size] * room + at % block_size
            for r, at in zip(requests, places, strict=True)
        ]
        inputs |= zip(table_inputs(number), (np.array(slots, np.int64), tables), strict=True)
    return inputs


def token_positions(batch: Batch, places: np.ndarray) -> np.ndarray:
    """The position of each new token, [T] int64: the place in the sequence, and behind gaps in a prompt more."""
    if all(item.request.positions is None for item in batch.items):
        return places
    found, start = places.copy(), 0
    for item in batch.items:
        if item.request.positions is not None:
            span = item.request.positions.span(item.request.num_computed, item.num_new)
            found[start : start + item.num_new] = span
        start += item.num_new
    return found


def last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ``counts[i]`` rows before each of ``ends``, in order: [sum of counts] int64."""
    first = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(ends - counts - first, counts)


def new_tokens(batch: Batch) -> np.ndarray:
    """The tokens to compute, sequence after sequence: [T] int64."""
    ids: list[int] = []
    for item in batch.items:
        ids += item.new_tokens
    return np.array(ids, dtype=np.int64)


def block_tables(batch: Batch, block_size: int, number: int, group: KVGroup, null: int) -> np.ndarray:
    """[S, B] int32, padded with 0; only blocks with tokens up to the step, and from the first that a token reads."""
    used = [-(-(item.request.num_held + item.num_new) // block_size) for item in batch.items]
    tables = np.zeros((len(used), max(used)), dtype=np.int32)
    for row, (item, count) in enumerate(zip(batch.items, used, strict=True)):
        table, first = item.request.block_tables[number], 0
        if group.window:
            first = first_block(group.window, item.request.num_computed, block_size)
            tables[row, :first] = null
        tables[row, first:count] = table[first:count]
    if group.fraction > 1:
        tables *= group.fraction
    return tables

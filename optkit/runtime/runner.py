"""ModelRunner: a scheduled batch becomes the flattened token batch, and the executable runs it.

docs/architecture.md lists the inputs. numpy computes the inputs of all requests at once, because Python code per token
would be a visible part of a prefill. Steps of a token a request, which decode, take another way: a few numbers are
collected in Python in a third of the time of two dozen numpy calls. A model of torch takes the arrays without a copy,
and a model of native calls alone (``optkit.lowering.native_model``) runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from optkit.graph.kv_layout import ONE_GROUP, KVGroup, KVLayout, one_group, table_inputs
from optkit.graph.states import STATE_SLOTS, KVSpec, StateSpec, sequence_bytes
from optkit.lowering.native_model import NativeStep
from optkit.runtime.draft_tree import DraftTree, Move
from optkit.runtime.kv.pools import HostPools, Pools, dtype_label
from optkit.runtime.kv.windows import first_block
from optkit.runtime.types import Batch, BlockCopy, Request, ScheduledRequest, StateCopy

if TYPE_CHECKING:
    import torch

    from optkit.kernels.cpu.decode_steps import Choice, Outlet


class ServableModel(Protocol):
    """A lowered graph: of torch (``optkit.lowering.lower.Executable``), called with the inputs of a step as tensors, or
    with a method ``step_on`` (``optkit.lowering.native_model.NativeModel``).
    """

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
        where = getattr(model, "device", "cpu") if device is None else device
        self.model = model
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, model.vocab_size
        self.layout = layout or one_group(model.states)
        self.kv_windows, self.kv_bytes = self.layout.windows, self.layout.num_bytes(num_blocks, block_size)
        self.kv_dtype = dtype_label(model.kv_specs)
        self.weight_bytes, self.workspace_bytes = model.weight_bytes, model.workspace_bytes
        self.num_slots = num_slots if sequence_bytes(model.states) else 0
        self.state_bytes = self.num_slots * sequence_bytes(model.states)
        self.pools = self._make_pools(where)
        self.kv_pools, self.state_pools = self.pools.kv, self.pools.states
        self._step = self.pools.bind(model)
        self.is_multi_step = isinstance(self._step, NativeStep)

    def _make_pools(self, device: torch.device | str) -> Pools:
        sizes = (self.layout, self.model.states, self.num_blocks, self.block_size)
        if str(device) == "cpu":
            return HostPools(*sizes, self.num_slots)
        from optkit.runtime.cuda.pools import DevicePools

        return DevicePools(*sizes, device, self.num_slots)

    def execute(self, batch: Batch) -> Any:
        """Logits [sum of num_logits, vocab_size] float32, in batch order: of NumPy, or on a device of torch."""
        batch = with_sinks(batch)
        arrays = self.batch_inputs(batch)
        if self.num_slots:
            arrays[STATE_SLOTS] = state_slots(batch, self.num_slots)
        count = len(arrays["logits_index"])
        if count == 0:  # kernels need not handle zero rows: compute one and drop it
            arrays["logits_index"] = np.array([batch.num_tokens - 1], dtype=np.int64)
        return self.run(arrays)[:count]

    def decode(self, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        """The tokens of decode steps, see ``Runner.decode``. For models of native calls alone, without states."""
        arrays = decode_inputs(batch, self.block_size, self.layout.groups, self.num_blocks)
        assert isinstance(self._step, NativeStep)
        return self._step.decode(arrays, choice, outlet)

    def run(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Logits of a step with the batch inputs ``arrays``."""
        return self._step(arrays)

    def batch_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """The flattened token batch, with the block tables of each group of layers."""
        return batch_inputs(batch, self.block_size, self.layout.groups, self.num_blocks)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        self.pools.copy_states(copies)

    def move_tokens(self, moves: Sequence[Move]) -> None:
        """Copy KV of tokens within their sequences. For models with one group of layers, on the CPU."""
        self.pools.move_tokens(moves)

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy the KV of a block in all layers, after the steps before."""
        self.pools.copy_block(copy)

    def read_block(self, block: int) -> np.ndarray:
        """The KV of ``block`` in the layers of its group, as bytes [n] uint8 on the host."""
        return self.pools.read_block(block)

    def write_block(self, block: int, data: np.ndarray) -> None:
        """Write the bytes of ``read_block`` into any block."""
        self.pools.write_block(block, data)


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
    """[S, B] int32, padded with 0; only blocks with tokens up to the last of the steps, and from the first that a token
    reads.
    """
    ahead = batch.num_steps - 1
    used = [-(-(item.request.num_held + item.num_new + ahead) // block_size) for item in batch.items]
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

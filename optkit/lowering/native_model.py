"""Models of native calls alone: packed weights and lists of calls, run without torch.

A lowered graph whose every step is one program needs torch for nothing: the calls read arrays at addresses. The
calls come from the lowered graph (``optkit.lowering.to_native``), and at later starts from a file of calls and packed
weights (``optkit.lowering.saved_file``). A start from the file neither imports torch nor packs weights again: two
seconds and 240 MiB less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import cast

import numpy as np

from optkit.graph.kv_layout import kv_layout, table_inputs, with_tables
from optkit.graph.states import KV_DTYPES, STATE_SLOTS, KVSpec, StateSpec, kv_of, numpy_dtype
from optkit.kernels.cpu.call_list import LOGITS, CallList
from optkit.kernels.cpu.decode_steps import Choice, Outlet, decode
from optkit.lowering.by_tokens import ByTokens

# The dtypes of the batch inputs (docs/architecture.md); tables of further groups have those of the first.
BATCH_DTYPES = {
    "input_ids": np.dtype(np.int64),
    "positions": np.dtype(np.int64),
    "slot_mapping": np.dtype(np.int64),
    "query_start": np.dtype(np.int32),
    "seq_lens": np.dtype(np.int32),
    "block_tables": np.dtype(np.int32),
    "logits_index": np.dtype(np.int64),
    STATE_SLOTS: np.dtype(np.int32),
}
Add = Callable[[tuple[int, int, int]], None]


@dataclass(frozen=True)
class NativeVariant:
    """The calls of steps of up to ``limit`` tokens; None is any number.

    Attributes:
        inputs: names in the order of the calls' inputs.
        width: numbers in a row of the result.
    """

    limit: int | None
    inputs: tuple[str, ...]
    calls: CallList
    width: int

    @property
    def call_lists(self) -> list[CallList]:
        """The native calls of a step."""
        return [self.calls]

    def workspace_bytes(self, sizes: tuple[int, int]) -> int:
        """Working memory in bytes of a step of so many tokens and rows of the result."""
        return self.calls.workspace_bytes(sizes)

    def run(self, addresses: Sequence[int], sizes: Sequence[int], rows: int) -> np.ndarray:
        """The result [rows, width] float32 of a step on inputs at ``addresses``."""
        result = np.empty((rows, self.width), np.float32)
        self.calls.inputs[:] = [*addresses, result.ctypes.data]
        self.calls.run(sizes)
        return result

    def decode(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        batch: Mapping[str, np.ndarray],
        tables: Sequence[tuple[str, str]],
        choice: Choice,
        outlet: Outlet,
    ) -> np.ndarray:
        """The tokens of decode steps (``optkit.kernels.cpu.decode_steps.decode``) on inputs at ``addresses``."""
        logits = np.empty((sizes[LOGITS], self.width), np.float32)
        self.calls.inputs[:] = [*addresses, logits.ctypes.data]
        return decode(self.calls, sizes, logits, batch, tables, choice, outlet)

    def timed(self, calls: CallList, number: int, add: Add, ran: Callable[[int, int], None]) -> NativeVariant:
        """A copy that runs ``calls`` and records each step: as op ``number`` by ``add``, and as a run by ``ran``."""
        return TimedVariant(self.limit, self.inputs, calls, self.width, number, add, ran)


@dataclass(frozen=True)
class TimedVariant(NativeVariant):
    """See ``NativeVariant.timed``."""

    number: int
    add: Add
    ran: Callable[[int, int], None]

    def run(self, addresses: Sequence[int], sizes: Sequence[int], rows: int) -> np.ndarray:
        start = perf_counter_ns()
        result = super().run(addresses, sizes, rows)
        end = perf_counter_ns()
        self.add((self.number, start, end))
        self.ran(start, end)
        return result


class NativeModel(ByTokens[NativeVariant]):
    """A model of native calls (``optkit.runtime.runner.ServableModel``).

    Args:
        variants: by number of tokens, the last for any number. Steps run in turn, so all share the first's working
            memory.
        memory: keeps the weights alive, whose addresses are in the calls.
        weight_bytes: bytes of the weights.
        keeps_all: the reason why sequences keep all their tokens, or empty.
    """

    device = "cpu"

    def __init__(
        self,
        variants: Sequence[NativeVariant],
        states: Sequence[StateSpec],
        vocab_size: int,
        max_model_len: int,
        memory: object,
        weight_bytes: int,
        keeps_all: str = "",
    ) -> None:
        self.variants, self.states = tuple(variants), tuple(states)
        self.kv_specs: list[KVSpec] = list(kv_of(states))
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.weight_bytes, self.keeps_all = weight_bytes, keeps_all
        self.further_inputs = kv_layout(states).further_inputs
        self.dtypes = BATCH_DTYPES | {name: BATCH_DTYPES[base] for name, base in self.further_inputs.items()}
        self._memory = memory
        for other in self.variants[1:]:
            other.calls.arena = self.variants[0].calls.arena

    def step_on(self, pools: Mapping[str, np.ndarray]) -> NativeStep:
        """The step of the model on ``pools``.

        Raises:
            ValueError: a pool has another shape or type than the model's layers write.
        """
        check_pools(self.states, pools)
        return NativeStep(self, pools)


class NativeStep:
    """The step of ``model`` on ``pools``, which were checked."""

    def __init__(self, model: NativeModel, pools: Mapping[str, np.ndarray]) -> None:
        self._model = model
        self._pools = {name: pool.ctypes.data for name, pool in pools.items()}
        specs = model.kv_specs
        self._block_size = pools[specs[0].inputs[0]].shape[1] if specs else 0
        groups = range(1 + len(model.further_inputs) // len(table_inputs(0)))
        self._tables = [cast("tuple[str, str]", table_inputs(group)) for group in groups]

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Logits [L, V] float32 of the flattened token batch ``arrays``."""
        variant, arrays, addresses, sizes = self._prepared(arrays)
        return variant.run(addresses, sizes, sizes[LOGITS])

    def decode(self, arrays: Mapping[str, np.ndarray], choice: Choice, outlet: Outlet) -> np.ndarray:
        """The tokens [n, S] int64 of decode steps, the first on ``arrays``, which are changed.

        See ``optkit.kernels.cpu.decode_steps.decode``.
        """
        variant, arrays, addresses, sizes = self._prepared(arrays)
        return variant.decode(addresses, sizes, arrays, self._tables, choice, outlet)

    def _prepared(
        self, arrays: Mapping[str, np.ndarray]
    ) -> tuple[NativeVariant, Mapping[str, np.ndarray], list[int], tuple[int, ...]]:
        """The variant for a step, all its arrays, the addresses of its inputs, and the sizes of the batch."""
        arrays = with_tables(arrays, self._model.further_inputs)
        tokens, rows = len(arrays["input_ids"]), len(arrays["logits_index"])
        sizes = (tokens, rows, len(arrays["seq_lens"]), arrays["block_tables"].shape[1], self._block_size)
        variant = self._model.variant(tokens)
        places = {**self._places(arrays), **self._pools}
        return variant, arrays, [places[name] for name in variant.inputs], sizes

    def _places(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """The address of each of ``arrays``.

        Raises:
            ValueError: native code would misread an array.
        """
        places = {}
        for name, array in arrays.items():
            if array.dtype != self._model.dtypes[name] or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be dense {self._model.dtypes[name]}, not {array.dtype}")
            places[name] = array.ctypes.data
        return places


def check_pools(states: Sequence[StateSpec], pools: Mapping[str, np.ndarray]) -> None:
    """Compare ``pools`` with ``states``, since the calls take addresses.

    Raises:
        ValueError: a pool has another shape or type, or is not dense.
    """
    block_sizes = set[tuple[int, ...]]()
    for spec in states:
        rows: Sequence[tuple[int, ...]]
        if isinstance(spec, KVSpec):
            (name, _), rows, before = KV_DTYPES[spec.dtype], spec.row_shapes, 2
            block_sizes |= {pools[each].shape[1:2] for each in spec.inputs}
        else:
            name, rows, before = spec.dtype, (spec.shape,), 1
        counts = {pools[each].shape[:1] for each in spec.inputs}
        for each, row in zip(spec.inputs, rows, strict=True):
            pool = pools[each]
            fits = pool.dtype == numpy_dtype(name) and pool.shape[before:] == row and pool.flags.c_contiguous
            if not fits or len(counts) > 1 or len(block_sizes) > 1:
                found = f"{pool.dtype} {list(pool.shape)}"
                raise ValueError(f"the pool {each} is {found}, not {name} {list(row)}")

"""Lists of native kernel calls, as ``program.cpp`` reads them: numbers and addresses, without torch.

``optkit.kernels.cpu.program`` makes the lists. A list runs any batch: the caller gives the sizes of the batch and the
addresses of inputs and outputs; buffers lie in an arena, with a place per row.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from optkit.cancellation import check_cancelled
from optkit.errors import CollectiveFailed
from optkit.kernels.cpu import native

ALIGN = 64  # bytes: a cache line, and the widest vector
CONSTANT, SIZE, INPUT, ARENA, BLOCK = range(5)  # of program.h
TOKENS, LOGITS, SEQUENCES, TABLE_WIDTH, BLOCK_SIZE = range(5)  # the sizes of a batch
NUM_SIZES = 5
ARGUMENT, CALL = struct.Struct("=iiqqq"), struct.Struct("=iiii")
# Tokens times bytes of weights: from here on a step is cancellable, some tens of milliseconds.
LONG_STEP = 2**32
CALLS_A_PART = 8  # of a cancellable step, at least; about a layer


@dataclass(frozen=True)
class Blocks:
    """Tokens of a block of a run: at most ``most``.

    With fewer than ``least`` tokens a thread, threads share each call.
    """

    least: int = 32
    most: int = 64

    def tokens(self, tokens: int, threads: int) -> int:
        """Tokens of a block of a step, or 0 where all tokens go through each call together.

        Blocks are of about the same size, and each thread gets equally many.
        """
        if tokens < threads * self.least:
            return 0
        blocks = -(-tokens // (self.most * threads)) * threads
        return -(-tokens // blocks)


class CallPlan(msgspec.Struct, frozen=True):
    """The facts of a list of calls.

    Attributes:
        runs: first call and end of each run, in order; all calls are in a run.
        bytes_per_row: of the arenas for buffers of tokens and of rows of logits.
        block_token_bytes: bytes of a token in the buffers of a block.
        weight_bytes: of the tensors with addresses in the calls.
        made_for: the node of the graph and the kernel of each call, for profiles.
    """

    runs: tuple[tuple[int, int], ...]
    blocks: tuple[int, int]
    bytes_per_row: tuple[int, ...]
    block_token_bytes: int
    num_inputs: int
    num_outputs: int
    weight_bytes: int
    made_for: tuple[tuple[str, str], ...]


class Arena:
    """Working memory of an executable's programs, which run one after another."""

    def __init__(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)

    def address(self, size: int) -> int:
        """The address of at least ``size`` bytes, on a cache line."""
        if self.memory.size < size + ALIGN:
            self.memory = np.empty(size + ALIGN, dtype=np.uint8)
        return -(-self.memory.ctypes.data // ALIGN) * ALIGN


class CallList:
    """Kernel calls for every batch size.

    Not reentrant: the arena belongs to one step at a time. The caller answers for the addresses in ``arguments`` and
    for those of inputs and outputs.

    Args:
        calls: ``CALL`` of each call.
        arguments: ``ARGUMENT`` of each argument of the calls, in order.

    Attributes:
        inputs: addresses of the inputs, then of the outputs, which a step reads.
        runs: the runs of calls, in order.
    """

    def __init__(self, plan: CallPlan, calls: bytes, arguments: bytes) -> None:
        self.plan, self.arena, self.blocks = plan, Arena(), Blocks(*plan.blocks)
        self.runs = [range(*run) for run in plan.runs]
        self.num_calls = len(calls) // CALL.size
        self._calls = ctypes.create_string_buffer(calls, len(calls))
        self._arguments = ctypes.create_string_buffer(arguments, len(arguments))
        self._sizes = (ctypes.c_int64 * NUM_SIZES)()
        self.inputs = (ctypes.c_int64 * (plan.num_inputs + plan.num_outputs))()
        self._arenas = (ctypes.c_int64 * len(plan.bytes_per_row))()
        self._block = (0, 0, 0)

    @property
    def calls(self) -> bytes:
        """``CALL`` of each call."""
        return self._calls.raw

    @property
    def arguments(self) -> bytes:
        """``ARGUMENT`` of each argument."""
        return self._arguments.raw

    def run(self, sizes: Sequence[int]) -> None:
        """Run all calls on a batch of these ``sizes``; ``inputs`` has the addresses.

        Raises:
            IndexError: a token id or a row to select does not exist.
            StepCancelled: from the check of the step (``optkit.cancellation``).
        """
        self._sizes[:] = list(sizes)
        self._place_arenas(sizes)
        is_long = sizes[TOKENS] * self.plan.weight_bytes >= LONG_STEP
        first = 0
        for run in self.runs:
            if (run.stop - first >= CALLS_A_PART and is_long) or run.stop == self.num_calls:
                if first:
                    check_cancelled()
                self._run(first, run.stop - first)
                first = run.stop

    def decode(self, sizes: Sequence[int], steps: ctypes.Structure) -> int:
        """Run the decode ``steps`` prepared by ``optkit.kernels.cpu.decode_steps``; the number of steps with tokens."""
        self._sizes[:] = list(sizes)
        self._place_arenas(sizes)
        arguments = self._native_arguments(0, self.num_calls)
        return int(native.library().optkit_decode_steps(*arguments, ctypes.addressof(steps)))

    def workspace_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of working memory for a batch of these ``sizes``."""
        tokens = self.blocks.tokens(sizes[TOKENS], native.threads())
        in_blocks = min(tokens * native.threads(), sizes[TOKENS]) if tokens else sizes[TOKENS]
        rows = sum(map(operator.mul, sizes, self.plan.bytes_per_row))
        return rows + in_blocks * self.plan.block_token_bytes

    def _run(self, first: int, count: int) -> None:
        """Run ``count`` calls from the call ``first`` on."""
        failed = self._call(first, count)
        if failed:
            number = first + failed - 1
            if self.plan.made_for[number][1].startswith("all_"):
                raise CollectiveFailed(f"a rank did not answer in call {number} of the program")
            raise IndexError(f"an index is out of range in call {number} of the program")

    def _call(self, first: int, count: int) -> int:
        """Run calls as ``_run``; 0, or 1 + the call with an index out of range, counted from ``first``."""
        return int(native.library().optkit_run_program(*self._native_arguments(first, count)))

    def _native_arguments(self, first: int, count: int) -> tuple[int, ...]:
        """The arguments of ``optkit_run_program``."""
        return (
            ctypes.addressof(self._calls) + first * CALL.size,
            count,
            ctypes.addressof(self._arguments),
            ctypes.addressof(self._sizes),
            ctypes.addressof(self.inputs),
            ctypes.addressof(self._arenas),
            *self._block,
            native.threads(),
        )

    def _place_arenas(self, sizes: Sequence[int]) -> None:
        """Lay buffers of tokens, then buffers of rows of logits, into the shared memory."""
        tokens = self.blocks.tokens(sizes[TOKENS], native.threads())
        local = 0 if tokens else sizes[TOKENS] * self.plan.block_token_bytes
        needed = [sizes[rows] * size for rows, size in enumerate(self.plan.bytes_per_row)]
        start = self.arena.address(sum(needed) + local)
        for i, size in enumerate(needed):
            self._arenas[i] = start
            start += size
        self._block = (start, tokens, self.plan.block_token_bytes)

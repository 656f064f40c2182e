"""Records of kernel calls (recorder.h): the memory for them, and lists of calls that write them.

The memory is allocated and touched before the first step, so recording neither allocates nor faults. A full recorder
drops further records and counts them.
"""

from __future__ import annotations

import ctypes

import numpy as np

from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import CallList

RECORD = np.dtype(
    [("start", "i8"), ("end", "i8"), ("op", "i4"), ("thread", "i4"), ("first", "i4"), ("count", "i4")]
)  # of recorder.h; times in ticks
WHOLE_RUN = -1  # in ``first``: a run of calls as a whole; ``count`` calls


class CallRecorder:
    """Room for ``capacity`` records [capacity] ``RECORD``."""

    def __init__(self, capacity: int) -> None:
        self.records = np.empty(capacity, RECORD)
        self.records.fill(0)  # memory that was not written before would fault in the middle of a step
        self._used = ctypes.c_int64(0)

    @property
    def used(self) -> int:
        """The number of records, those dropped included."""
        return self._used.value

    def clear(self) -> None:
        """Drop all records."""
        self._used.value = 0

    @property
    def native_arguments(self) -> tuple[int, int, int]:
        """The arguments of ``optkit_run_program_recorded`` with the memory."""
        return self.records.ctypes.data, len(self.records), ctypes.addressof(self._used)


class RecordedCalls(CallList):
    """``calls`` with a record of each call in ``recorder``.

    Plan, inputs and working memory are those of ``calls``: the two must not run at once.

    Args:
        first_op: the number of the first call in records.
    """

    def __init__(self, calls: CallList, recorder: CallRecorder, first_op: int) -> None:
        vars(self).update(vars(calls))
        self.recorder, self.first_op = recorder, first_op

    def _call(self, first: int, count: int) -> int:
        arguments = self._native_arguments(first, count)
        number = self.first_op + first
        run = native.library().optkit_run_program_recorded
        return int(run(*arguments, *self.recorder.native_arguments, number))


def most_records(calls: CallList, tokens: int) -> int:
    """The largest number of records of a step with up to ``tokens`` tokens, on the threads of now."""
    size = calls.blocks.tokens(tokens, native.threads())
    blocks = -(-tokens // size) if size else 1
    return sum(len(run) * blocks + 1 if len(run) > 1 else 1 for run in calls.runs)


def ticks() -> int:
    """The time in ticks of records."""
    return int(native.library().optkit_ticks())

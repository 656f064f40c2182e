"""A recorded step as slices of time: nested on the main thread, and side by side on the threads of the kernels.

=========================  ================================================================================
part of a step             contents
=========================  ================================================================================
scheduling                 the schedule, copies of KV, guesses of a draft model
packing the batch          the inputs of the model as tensors
ops                        kernels called by programs, and ops called from Python
launching kernels          a program's own work: addresses, output tensors, the time between two kernels
waiting for threads        at the end of a run of calls by blocks of tokens, threads without a block left
between ops                generated code between two calls from Python, and checks for cancellation
sampling                   the next tokens, from the logits
recording the results      the tokens, the state of the requests, the prefix cache
=========================  ================================================================================

A kernel in a run of blocks takes the time of a thread. The share of the step is that time divided by the number of
threads, so the parts add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from optkit.profiling.recording import Recorded, RecordedStep
from optkit.profiling.timing import PROGRAM

SCHEDULING, PACKING, SAMPLING = "scheduling", "packing the batch", "sampling"
RESULTS, LAUNCHING = "recording the results", "launching kernels"
WAITING, BETWEEN = "waiting for threads", "between ops"
MODEL, RUN = "model", "run of blocks"
SKEW = 1000  # nanoseconds between the clocks of native calls and of Python, at most
CHECK = "check_cancelled"  # the node of a check, part of BETWEEN


class Slice(NamedTuple):
    """Time of a thread, in nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        op: number of the op, or -1.
        tokens: of a block, or 0.
    """

    name: str
    start: int
    end: int
    op: int = -1
    tokens: int = 0


@dataclass(frozen=True)
class Timeline:
    """A step in slices.

    Attributes:
        threads: the slices of each thread in order of start, outer slices first; the first thread is the main one.
        ops: nanoseconds of the step for each op, by number.
        parts: nanoseconds of the step for the other parts, by name.
    """

    step: RecordedStep
    threads: list[list[Slice]]
    ops: dict[int, float]
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def accounted(self) -> float:
        """Share of the step in ops and named parts, without the time between ops."""
        return 1.0 - self.parts[BETWEEN] / max(1, self.step.end - self.step.begin)


@dataclass
class _Sums:
    """Nanoseconds of ops and parts so far."""

    ops: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def timelines(recorded: Recorded) -> list[Timeline]:
    """The steps of ``recorded`` in slices, in order."""
    return [timeline(recorded, step) for step in recorded.steps]


def timeline(recorded: Recorded, step: RecordedStep) -> Timeline:
    """A step in slices."""
    sums, native = _Sums(), _Native(recorded, step)
    begin, end = step.runs[0][0], step.runs[-1][1]
    sums.parts[SCHEDULING] = step.scheduled - step.begin
    sums.parts[PACKING] = begin - step.scheduled
    sums.parts[SAMPLING] = step.sampled - end
    sums.parts[RESULTS] = step.end - step.sampled
    sums.parts[BETWEEN] = end - begin
    main = [
        Slice(f"{step.phase} step", step.begin, step.end),
        Slice(SCHEDULING, step.begin, step.scheduled),
        Slice(PACKING, step.scheduled, begin),
        Slice(MODEL, begin, end),
        *_called(recorded, step, native, sums),
        Slice(SAMPLING, end, step.sampled),
        Slice(RESULTS, step.sampled, step.end),
    ]
    return Timeline(step, [nested(main), *native.workers], dict(sums.ops), dict(sums.parts))


def _called(recorded: Recorded, step: RecordedStep, native: _Native, sums: _Sums) -> Iterator[Slice]:
    """The slices of calls from Python and of native calls of the main thread; adds up ``sums``."""
    for number, start, end in step.calls:
        op, took = recorded.ops[number], end - start
        if op.node.startswith(CHECK):
            continue
        sums.parts[BETWEEN] -= took
        if op.kernel == PROGRAM:
            yield Slice(PROGRAM, start, end)
            sums.parts[LAUNCHING] += took - native.add_up(start, end, sums)
            yield from native.main(start, end)
        else:
            sums.ops[number] += took
            yield Slice(op.node, start, end, number)


class _Native:
    """The native records of a step: of the main thread and of the workers."""

    def __init__(self, recorded: Recorded, step: RecordedStep) -> None:
        self.recorded, self.num_threads = recorded, step.threads
        records = step.native
        self.workers: list[list[Slice]] = []
        if not len(records) or recorded.clock is None:
            self.start = self.end = self.op = self.count = np.empty(0, np.int64)
            self.is_run = self.is_main = self.in_run = np.empty(0, bool)
            return
        from optkit.kernels.cpu.recorder import WHOLE_RUN

        records = records[np.lexsort((-records["end"], records["start"]))]  # outer slices first
        self.start = recorded.clock.nanoseconds(records["start"])
        self.end = recorded.clock.nanoseconds(records["end"])
        self.op, self.count = records["op"].astype(np.int64), records["count"].astype(np.int64)
        self.is_run = records["first"] == WHOLE_RUN
        thread = records["thread"]
        self.in_run = self._inside_runs()
        main = thread[self.is_run | ~self.in_run]  # what is no block runs on the thread of the step
        self.is_main = thread == (main[0] if len(main) else thread[0])
        for number in sorted(set(thread[~self.is_main].tolist())):
            self.workers.append(nested(self._slices(thread == number)))

    def _inside_runs(self) -> np.ndarray:
        """True for calls within a run: runs and calls outside come one after another on one thread."""
        starts, ends = self.start[self.is_run], self.end[self.is_run]
        place = np.searchsorted(starts, self.start, side="right") - 1
        inside = (place >= 0) & ~self.is_run
        inside[inside] &= self.start[inside] < ends[place[inside]]
        return inside

    def add_up(self, start: int, end: int, sums: _Sums) -> int:
        """Add the calls between ``start`` and ``end`` to ``sums``; nanoseconds of all, on the clock of the wall."""
        here = (self.start >= start - SKEW) & (self.start < end)
        took = self.end - self.start
        shares = np.where(self.in_run, took / max(1, self.num_threads), took)
        kernels = here & ~self.is_run
        for op, share in zip(self.op[kernels].tolist(), shares[kernels].tolist(), strict=True):
            sums.ops[op] += share
        runs = int(took[here & self.is_run].sum())
        sums.parts[WAITING] += runs - float(shares[here & self.in_run].sum())
        return runs + int(took[here & ~self.is_run & ~self.in_run].sum())

    def main(self, start: int, end: int) -> Iterator[Slice]:
        """The slices of the main thread between ``start`` and ``end``, as parts of the slice around them."""
        for each in self._slices(self.is_main & (self.start >= start - SKEW) & (self.start < end)):
            yield each._replace(start=max(each.start, start), end=min(each.end, end))

    def _slices(self, chosen: np.ndarray) -> Iterator[Slice]:
        ops = self.recorded.ops
        columns = (self.op, self.start, self.end, self.count, self.is_run)
        for op, start, end, count, is_run in zip(
            *(column[chosen].tolist() for column in columns), strict=True
        ):
            name = RUN if is_run else ops[op].node
            yield Slice(name, start, end, -1 if is_run else op, 0 if is_run else count)


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """``slices`` in order of start, outer slices first."""
    return sorted(slices, key=lambda each: (each.start, -each.end))

"""A recording: the times of an engine's steps, of their parts, and of each op.

A recording observes an engine (``optkit.profiling.observer``). A recording takes a bounded number of steps of
each phase and then leaves the engine alone: the executable runs its plain functions again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.profiling.clock import TickClock, now
from optkit.profiling.observer import Work
from optkit.profiling.timing import Call, Op, Timing

if TYPE_CHECKING:
    import numpy as np

    from optkit.kernels.cpu.recorder import CallRecorder
    from optkit.lowering.lower import Executable

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
STEPS, MOST_STEPS = 3, 100  # of each phase: the default, and the largest number
MOST_RECORDS = 1 << 21  # 64 MiB of native calls


@dataclass(frozen=True)
class RecordedStep:
    """A step; times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        runs: of the model, (start, end) each; several only after a failure.
        calls: of ops from Python, in order of their ends.
        native: records of native calls [n] ``optkit.kernels.cpu.recorder.RECORD``, in ticks.
        threads: of the kernels.
    """

    work: tuple[Work, ...]
    begin: int
    scheduled: int
    sampled: int
    end: int
    runs: tuple[tuple[int, int], ...]
    calls: tuple[Call, ...]
    native: np.ndarray
    threads: int

    @property
    def phase(self) -> str:
        return phase_of(self.work)

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


@dataclass(frozen=True)
class Recorded:
    """The steps of a recording, in order.

    Attributes:
        ops: by their numbers in the steps.
        clock: of the native records; None where there are none.
        num_lost: steps without room for their records.
    """

    steps: tuple[RecordedStep, ...]
    ops: tuple[Op, ...]
    clock: TickClock | None
    num_lost: int = 0


def phase_of(work: Sequence[Work]) -> str:
    """``DECODE`` for a step of decodes alone; a step with a part of a prompt is ``PREFILL``."""
    return DECODE if all(each.is_decode for each in work) else PREFILL


class _Taken(NamedTuple):
    """A step as it is kept while others run: little work in the engine, whose caches are cold after a step.

    ``first`` and ``last`` are numbers of native records.
    """

    work: Sequence[Work]
    times: tuple[int, int, int, int]  # begin, scheduled, sampled, end
    runs: tuple[tuple[int, int], ...]
    calls: tuple[tuple[int, int, int], ...]
    first: int
    last: int


class Recording:
    """Records up to ``steps`` steps of each phase of an engine on ``model``.

    Args:
        most_tokens: of a step.
        sequences: a decode of fewer is not recorded.

    Attributes:
        is_on: True until all wanted steps are recorded.
        counts: recorded steps of each phase.

    Raises:
        UserError: a number of steps out of range, or a model on a GPU.
    """

    is_on = True

    def __init__(self, model: Executable, most_tokens: int, steps: int = STEPS, sequences: int = 1) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise UserError(f"{steps} steps can't be recorded", where="steps", fix=f"1 to {MOST_STEPS} can")
        if str(model.device) != "cpu":
            raise UserError("ops are recorded on CPUs alone", where="profile")
        self.model, self.steps, self.most_tokens, self.sequences = model, steps, most_tokens, sequences
        self.threads = int(native.threads())
        self.timing = Timing(self._make_recorder)
        self.plain = model.variants
        self.timed = tuple(map(self.timing.variant, self.plain))
        self.counts: Counter[str] = Counter()
        self._taken: list[_Taken] = []
        self._start = now(self._ticks) if self.timing.recorder else None
        self._on = False  # in a step that is recorded
        self._phase, self._work = "", list[Work]()
        self._begin = self._scheduled = self._sampled = self._first = 0

    def _make_recorder(self) -> CallRecorder:
        from optkit.kernels.cpu.recorder import CallRecorder, most_records

        each = sum(most_records(calls, self.most_tokens) for v in self.plain for calls in v.call_lists)
        return CallRecorder(min(MOST_RECORDS, each * (len(PHASES) * self.steps + 1)))

    @staticmethod
    def _ticks() -> int:
        from optkit.kernels.cpu.recorder import ticks

        return ticks()

    def close(self) -> None:
        """Let the model run the plain functions, also after a failed step."""
        self._on = False
        self.model.variants = self.plain

    # -- the engine's side -----------------------------------------------------------------------------

    def begin(self) -> None:
        if self._on:  # the step before failed
            self.close()
        self._begin = perf_counter_ns()

    def scheduled(self, work: Sequence[Work]) -> None:
        phase = phase_of(work)
        too_few = phase == DECODE and len(work) < self.sequences
        if not work or too_few or self.counts[phase] >= self.steps:
            return
        self._phase, self._work = phase, list(work)
        self.timing.calls.clear()
        self.timing.runs.clear()
        self._first = self._used
        self.model.variants = self.timed
        self._on = True
        self._scheduled = perf_counter_ns()

    def sampled(self) -> None:
        self._sampled = perf_counter_ns()

    def end(self) -> None:
        if not self._on:
            return
        end = perf_counter_ns()
        self.close()
        runs = tuple(self.timing.runs)
        if runs:  # else the step was cancelled
            times = (self._begin, self._scheduled, self._sampled, end)
            calls = tuple(self.timing.calls)
            self._taken.append(_Taken(self._work, times, runs, calls, self._first, self._used))
            self.counts[self._phase] += 1
            self.is_on = any(self.counts[phase] < self.steps for phase in PHASES)

    @property
    def _used(self) -> int:
        """The number of native records so far, also of records without room."""
        return self.timing.recorder.used if self.timing.recorder else 0

    # -- the result ------------------------------------------------------------------------------------

    def result(self) -> Recorded:
        """The recorded steps. The native records are copied, so the recording can be dropped."""
        clock = TickClock(self._start, now(self._ticks)) if self._start is not None else None
        room = len(self.timing.recorder.records) if self.timing.recorder else 0
        steps = tuple(self._step(taken) for taken in self._taken if taken.last <= room)
        return Recorded(steps, tuple(self.timing.ops), clock, len(self._taken) - len(steps))

    def _step(self, taken: _Taken) -> RecordedStep:
        import numpy as np

        recorder, calls = self.timing.recorder, tuple(Call(*call) for call in taken.calls)
        records = recorder.records[taken.first : taken.last].copy() if recorder else np.empty(0)
        return RecordedStep(tuple(taken.work), *taken.times, taken.runs, calls, records, self.threads)

"""A recording: the times of an engine's steps, of their parts, and of each op.

A recording observes an engine (``optkit.profiling.observer``). A recording takes a bounded number of steps of
each phase and then leaves the engine alone: the executable runs its plain functions again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

from optkit.errors import UserError
from optkit.profiling.clock import TickClock, now
from optkit.profiling.observer import Work
from optkit.profiling.timed import Call, Op, Timing

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


@dataclass
class _Current:
    """The step under way."""

    work: tuple[Work, ...]
    begin: int
    scheduled: int
    first_record: int
    sampled: int = 0


class Recording:
    """Records up to ``steps`` steps of each phase of an engine on ``model``.

    Args:
        most_tokens: of a step.

    Raises:
        UserError: a number of steps out of range, or a model on a GPU.
    """

    def __init__(self, model: Executable, most_tokens: int, steps: int = STEPS) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise UserError(f"{steps} steps can't be recorded", where="steps", fix=f"1 to {MOST_STEPS} can")
        if model.device.type != "cpu":
            raise UserError("ops are recorded on CPUs alone", where="profile")
        self.model, self.steps, self.most_tokens = model, steps, most_tokens
        self.timing = Timing(self._make_recorder)
        self.plain = model.variants
        self.timed = tuple(map(self.timing.variant, self.plain))
        self.taken: list[RecordedStep] = []
        self.counts: Counter[str] = Counter()
        self.num_lost = 0
        self._first = now(self._ticks) if self.timing.recorder else None
        self._begin, self._current = 0, _Current((), 0, 0, 0)
        self._on = False  # in a step that is recorded

    def _make_recorder(self) -> CallRecorder:
        from optkit.kernels.cpu.recorder import CallRecorder, most_records

        each = sum(most_records(program, self.most_tokens) for v in self.plain for program in v.programs)
        return CallRecorder(min(MOST_RECORDS, each * (len(PHASES) * self.steps + 1)))

    @staticmethod
    def _ticks() -> int:
        from optkit.kernels.cpu.recorder import ticks

        return ticks()

    @property
    def is_on(self) -> bool:
        """True until all steps that are wanted are recorded."""
        return any(self.counts[phase] < self.steps for phase in PHASES)

    def close(self) -> None:
        """Let the model run its plain functions, also after a step that failed."""
        self._on = False
        self.model.variants = self.plain

    # -- the engine's side -----------------------------------------------------------------------------

    def begin(self) -> None:
        self._begin = perf_counter_ns()

    def scheduled(self, work: Sequence[Work]) -> None:
        self._on = bool(work) and self.counts[phase_of(work)] < self.steps
        self.model.variants = self.timed if self._on else self.plain
        if self._on:
            self.timing.calls.clear()
            self.timing.runs.clear()
            used = self.timing.recorder.used if self.timing.recorder else 0
            self._current = _Current(tuple(work), self._begin, perf_counter_ns(), used)

    def sampled(self) -> None:
        if self._on:
            self._current.sampled = perf_counter_ns()

    def end(self) -> None:
        if not self._on:
            return
        end, current = perf_counter_ns(), self._current
        self.close()
        if not self.timing.runs:  # the step was cancelled
            return
        native = self._native_since(current.first_record)
        if native is None:
            self.num_lost += 1
        else:
            times = (current.begin, current.scheduled, current.sampled, end)
            calls = tuple(Call(*call) for call in self.timing.calls)
            runs, threads = tuple(self.timing.runs), self._threads()
            self.taken.append(RecordedStep(current.work, *times, runs, calls, native, threads))
        self.counts[phase_of(current.work)] += 1

    def _native_since(self, first: int) -> np.ndarray | None:
        """The native records of a step, from number ``first`` on; None where there was no room for all."""
        import numpy as np

        recorder = self.timing.recorder
        if recorder is None:
            return np.empty(0)
        last = recorder.used
        return recorder.records[first:last] if last <= len(recorder.records) else None

    @staticmethod
    def _threads() -> int:
        from optkit.kernels.cpu import native

        return int(native.threads())

    # -- the result ------------------------------------------------------------------------------------

    def result(self) -> Recorded:
        """The recorded steps. The native records are copied, so the recording can be dropped."""
        clock = TickClock(self._first, now(self._ticks)) if self._first is not None else None
        steps = tuple(replace(step, native=step.native.copy()) for step in self.taken)
        return Recorded(steps, tuple(self.timing.ops), clock, self.num_lost)

"""The numbers of ops in records, and the records of an executable's steps. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from optkit.kernels.cpu.recorder import RecordedCalls
from optkit.lowering.native_model import NativeVariant

if TYPE_CHECKING:
    from optkit.kernels.cpu.call_list import CallList
    from optkit.kernels.cpu.recorder import CallRecorder

PROGRAM = "program"  # the kernel of a node that runs native calls


class Op(NamedTuple):
    """An op with a number in records: the node of the graph, and the kernel."""

    node: str
    kernel: str


class Call(NamedTuple):
    """A call of an op from Python; times are nanoseconds of ``time.perf_counter_ns``."""

    op: int
    start: int
    end: int


class Timing:
    """Makes timed copies of variants, and numbers their ops.

    Attributes:
        ops: by number.
        calls: from Python, in order of their ends.
        runs: of the model, (start, end) each.
        recorder: of native calls; None without programs.
    """

    recorder: CallRecorder | None = None

    def __init__(self, make_recorder: Callable[[], CallRecorder]) -> None:
        self.ops: list[Op] = []
        self.calls: list[tuple[int, int, int]] = []
        self.runs: list[tuple[int, int]] = []
        self._make_recorder = make_recorder

    def variant(self, plain: Any) -> Any:
        """The timed copy of ``plain``, a variant of an executable."""
        if isinstance(plain, NativeVariant):
            calls = self.recorded(plain.calls)
            return plain.timed(calls, self.number(Op(PROGRAM, PROGRAM)), self.calls.append, self.add_run)
        from optkit.profiling.timed import timed_variant

        return timed_variant(self, plain)

    def number(self, op: Op) -> int:
        """The number of a new op."""
        self.ops.append(op)
        return len(self.ops) - 1

    def recorded(self, calls: CallList) -> RecordedCalls:
        """``calls`` with records, whose ops get numbers."""
        self.recorder = self.recorder or self._make_recorder()
        recorded = RecordedCalls(calls, self.recorder, len(self.ops))
        self.ops += [Op(*pair) for pair in calls.plan.made_for]
        return recorded

    def add_run(self, start: int, end: int) -> None:
        """Record a run of the model; nanoseconds."""
        self.runs.append((start, end))

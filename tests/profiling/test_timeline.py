"""Timelines: slices that nest, and parts that add up to the step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from optkit.kernels.cpu import native
from optkit.kernels.cpu.recorder import RECORD, WHOLE_RUN
from optkit.profiling.clock import Instant, TickClock
from optkit.profiling.observer import Work
from optkit.profiling.recording import Recorded, RecordedStep
from optkit.profiling.timeline import (
    BETWEEN,
    LAUNCHING,
    PACKING,
    RESULTS,
    SAMPLING,
    SCHEDULING,
    WAITING,
    Slice,
    timeline,
    timelines,
)
from optkit.profiling.timing import PROGRAM, Call, Op
from tests.support.recorded import tiny_recorded

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
SAME = TickClock(Instant(0, 0), Instant(1000, 1000))  # a tick is a nanosecond


def check_nesting(slices: list[Slice]) -> None:
    """Each slice ends within the one around it, and after it began."""
    around: list[Slice] = []
    for each in slices:
        while around and around[-1].end <= each.start:
            around.pop()
        assert each.start <= each.end and all(outer.end >= each.end for outer in around), (around, each)
        around.append(each)
    assert all(a.start <= b.start for a, b in pairwise(slices))


@needs_native
def test_parts_of_real_steps_add_up_and_slices_nest() -> None:
    for taken in timelines(tiny_recorded()):
        whole = taken.step.end - taken.step.begin
        assert sum(taken.ops.values()) + sum(taken.parts.values()) == pytest.approx(whole, rel=1e-9)
        assert all(spent >= -1000 for spent in taken.parts.values()), taken.parts
        assert 0 < taken.accounted <= 1.001
        for slices in taken.threads:
            check_nesting(slices)
        assert taken.threads[0][0] == Slice(f"{taken.step.phase} step", taken.step.begin, taken.step.end)


def records(*rows: tuple[int, int, int, int, int, int]) -> np.ndarray:
    return np.array(list(rows), RECORD)


def step_of(native_records: np.ndarray, calls: tuple[Call, ...], threads: int = 2) -> RecordedStep:
    work = (Work(4, 4),)
    return RecordedStep(work, 0, 100, 900, 1000, ((150, 850),), calls, native_records, threads)


def test_parts_by_hand() -> None:
    """Two threads: a run of blocks of ops 0 and 1, a call of op 2 on the main thread, and op 4 from Python."""
    ops = (Op("a", "k"), Op("b", "k"), Op("c", "k"), Op("program", PROGRAM), Op("d", "torch"))
    rows = records(
        (210, 290, 0, 5, 0, 2), (290, 390, 1, 5, 0, 2),  # the main thread's block
        (220, 310, 0, 6, 2, 2), (310, 380, 1, 6, 2, 2),  # the worker's
        (205, 400, 0, 5, WHOLE_RUN, 2),
        (420, 520, 2, 5, 0, 4),
    )  # fmt: skip
    taken = timeline(Recorded((), ops, SAME), step_of(rows, (Call(3, 200, 550), Call(4, 600, 800))))
    assert taken.ops == {0: (80 + 90) / 2, 1: (100 + 70) / 2, 2: 100, 4: 200}
    wanted = {SCHEDULING: 100, PACKING: 50, SAMPLING: 50, RESULTS: 100}
    wanted |= {WAITING: 195 - 170, LAUNCHING: 350 - 195 - 100, BETWEEN: 700 - 350 - 200}
    assert taken.parts == pytest.approx(wanted)
    assert [[s.name for s in slices] for slices in taken.threads[1:]] == [["a", "b"]]
    main = [s.name for s in taken.threads[0]]
    assert main == [
        *("prefill step", SCHEDULING, PACKING, "model", PROGRAM, "run of blocks", "a", "b", "c", "d"),
        *(SAMPLING, RESULTS),
    ]
    check_nesting(taken.threads[0])
    assert taken.accounted == pytest.approx(1 - 150 / 1000)


def test_checks_for_cancellation_belong_between_ops() -> None:
    ops = (Op("check_cancelled_1", "torch"), Op("d", "torch"))
    taken = timeline(Recorded((), ops, None), step_of(np.empty(0), (Call(0, 200, 300), Call(1, 300, 800))))
    assert taken.ops == {1: 500} and taken.parts[BETWEEN] == 700 - 500
    assert len(taken.threads) == 1

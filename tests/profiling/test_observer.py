"""What an engine tells of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from optkit.profiling.observer import NoObserver, Work
from optkit.runtime.types import SamplingParams
from tests.support.tiny_runtime import engine


class Log(NoObserver):
    """An observer that keeps what it is told."""

    is_on = True

    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(self) -> None:
        self.told.append("begin")

    def scheduled(self, work: Sequence[Work]) -> None:
        self.told.append(list(work))

    def sampled(self) -> None:
        self.told.append("sampled")

    def end(self) -> None:
        self.told.append("end")


def test_engine_tells_each_step_in_order() -> None:
    made, log = engine(enable_prefix_caching=False), Log()
    made.observer = log
    made.generate([[3, 4, 5], [6, 7]], SamplingParams(max_tokens=2, temperature=0.0))
    first = ["begin", [Work(3, 3), Work(2, 2)], "sampled", "end"]
    second = ["begin", [Work(1, 4), Work(1, 3)], "sampled", "end"]
    assert log.told == first + second


def test_engine_without_a_recording_tells_no_work() -> None:
    made, log = engine(enable_prefix_caching=False), Log()
    log.is_on = False
    made.observer = log
    made.generate([[3, 4]], SamplingParams(max_tokens=1, temperature=0.0))
    assert log.told == ["begin", "sampled", "end"]
    nobody = NoObserver()
    assert (nobody.begin(), nobody.scheduled([]), nobody.sampled(), nobody.end()) == (None, None, None, None)

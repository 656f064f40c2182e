"""Servers of the benchmark of the simulator: all start, and all requests are answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from bench.simulator.machine import OneArtifact
from optkit.bench.records import RequestRecord
from optkit.bench.slo import Load
from optkit.errors import UserError
from optkit.tune.lab import Shape
from optkit.tune.settings import Setting
from tests.support.rounds import broken, record

ONE, TWO = Setting.of("artifact", {}), Setting.of("artifact", {"max_num_seqs": 2})


class Fake(OneArtifact):
    """A machine whose servers start unless named in ``broken``, and answer with ``records``."""

    def __init__(self, broken: dict[Setting, str], records: Sequence[RequestRecord]) -> None:
        self._artifact, self.broken, self.records = "artifact", broken, records  # type: ignore[assignment]
        self.shape = Shape(8, 8, Load(rate=1.0))

    @contextmanager
    def serving(self, settings: Sequence[Setting]) -> Iterator[Any]:
        yield lambda *_: list(self.records), self.broken


def test_a_server_that_does_not_start_ends_the_benchmark() -> None:
    machine = Fake({TWO: "no memory"}, [])
    with pytest.raises(UserError, match="no memory") as error, machine.serving_all(ONE, TWO):
        pass
    assert error.value.fix is not None and "--rank" in error.value.fix


@pytest.mark.parametrize("failure", [None, "HTTP 500"])
def test_a_run_with_failed_requests_is_refused(failure: str | None) -> None:
    records = [record(0, 0.5), record(1, 0.5) if failure is None else broken(1)]
    with Fake({}, records).serving_all(ONE) as run:
        if failure is None:
            assert run(ONE, None, 1.0) == records  # type: ignore[arg-type]
        else:
            with pytest.raises(UserError, match="1 of 2 requests failed: HTTP 500"):
                run(ONE, None, 1.0)  # type: ignore[arg-type]

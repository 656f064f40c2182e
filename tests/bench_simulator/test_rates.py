"""The verdicts of the comparison of simulated and measured latencies."""

from __future__ import annotations

import math

from bench.simulator.machine import median_seconds
from bench.simulator.rates import NUMBERS, at, missed_numbers, slower
from optkit.bench.records import RequestRecord
from optkit.simulation.simulator import Overheads


def row(load: float, error: float) -> dict[str, object]:
    return {"share": load, "load": load} | {".".join(path): {"error": error} for path in NUMBERS}


def test_errors_count_below_four_fifths_of_the_capacity() -> None:
    assert len(missed_numbers(row(0.7, -0.16))) == len(NUMBERS)
    assert len(missed_numbers(row(0.7, math.nan))) == len(NUMBERS)
    assert missed_numbers(row(0.7, 0.14)) == missed_numbers(row(0.85, 0.9)) == []
    assert at({"a": {"b": 2}}, ("a", "b")) == 2.0


def test_drift_slows_all_parts_of_the_costs_alike() -> None:
    assert slower(Overheads(1.0, 2.0, 3.0, 4.0), 2.0) == Overheads(2.0, 4.0, 6.0, 8.0)
    done = [RequestRecord(0, 1.0, done=3.0), RequestRecord(1, 1.0, done=2.0), RequestRecord(2, 1.0)]
    assert median_seconds(done) == 1.5

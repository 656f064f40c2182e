"""Loads of a plan: traces from their first request on, and Poisson arrivals."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.plan.trace import mean_rate, poisson, read_trace
from optkit.recipe.schema import Workload

LINES = """{"timestamp": 4000, "input_length": 640, "output_length": 32, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 100, "output_length": 3, "hash_ids": [0]}

{"timestamp": 3000, "input_length": 1, "output_length": 1}
"""


def test_a_trace_is_read_in_order_from_0(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(LINES)
    found = read_trace(file)
    assert [(one.seconds, one.prompt, one.output) for one in found] == [(0, 100, 3), (2, 1, 1), (3, 640, 32)]
    assert mean_rate(found) == pytest.approx(2 / 3)
    assert [one.prompt for one in read_trace(file, 1 / 32)] == [3, 1, 20]


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(LINES + '{"timestamp": 0, "input_length": 0, "output_length": 1}\n')
    with pytest.raises(UserError, match=r"t\.jsonl:5: no request of a trace .*length 0"):
        read_trace(file)


def test_too_little_and_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(LINES.splitlines()[0])
    (tmp_path / "fast").write_text(
        '{"timestamp": 0, "input_length": 4, "output_length": 2}\n'
        '{"timestamp": 1e-320, "input_length": 4, "output_length": 2}\n'
    )
    with pytest.raises(UserError, match="requests/s"):
        read_trace(tmp_path / "fast")
    for name, message in (("one", "two requests at different times"), ("none", "can't be read")):
        with pytest.raises(UserError, match=message):
            read_trace(tmp_path / name)


def test_a_poisson_load_has_its_rate_and_the_lengths_of_the_workload() -> None:
    workload = Workload(prompt_tokens=(64, 256), output_tokens=9, histogram=((64, 3.0), (256, 1.0)))
    found = poisson(workload, 5.0)
    gaps = [b.seconds - a.seconds for a, b in pairwise(found)]
    assert mean_rate(found) == pytest.approx(5.0, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(
        statistics.fmean(gaps), rel=0.1
    )  # as of an exponential law
    assert sum(one.prompt == 64 for one in found) / len(found) == pytest.approx(0.75, abs=0.05)
    assert found == poisson(workload, 5.0)
    assert len(found) == 2000 and len(poisson(workload, 4000.0)) == 40_000  # many replicas need many requests

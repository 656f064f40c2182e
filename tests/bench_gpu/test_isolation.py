"""What goes wrong in a process of measurements costs one of them."""

from __future__ import annotations

import time

from bench.gpu.isolation import measured
from tests.support.measures import open_measures


def test_what_breaks_costs_only_itself() -> None:
    jobs = [["well", "fail", "die", "after"], ["hang"]]
    rows = dict(measured(jobs, open_measures, processes=2, limit=2.0, deadline=time.monotonic() + 60))
    assert rows["well"]["us"] == 1.0 and rows["after"]["us"] == 2.0
    assert rows["well"]["pid"] != rows["after"]["pid"]
    assert "no such luck" in rows["fail"]["error"]
    assert rows["die"]["error"] == "its process ended with code 3"
    assert "longer than 2 s" in rows["hang"]["error"]


def test_after_the_deadline_nothing_is_waited_for() -> None:
    start = time.monotonic()
    assert not dict(measured([["hang"], ["well"]], open_measures, 1, limit=600.0, deadline=start + 1.0))
    assert time.monotonic() - start < 30.0

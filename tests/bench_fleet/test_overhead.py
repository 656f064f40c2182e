"""Figures of answers."""

from __future__ import annotations

import pytest

from bench.fleet.overhead import Timed, goodput, timed


def test_an_answer_is_measured_from_its_chunks() -> None:
    found = timed(10.0, [10.05, 10.06, 10.10], 6)
    assert (found.ttft, found.tpot) == pytest.approx((0.05, 0.01))


def test_goodput_counts_tokens_of_good_answers() -> None:
    good, slow, late = Timed(0.02, 0.010, 50), Timed(0.02, 0.013, 50), Timed(0.2, 0.010, 50)
    assert goodput([good, good, slow, late], 2.0) == 50.0

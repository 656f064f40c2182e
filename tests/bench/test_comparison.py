"""Ratios of two sides: pairs by prompt, intervals over rounds, refused percentiles."""

from __future__ import annotations

import pytest

from optkit.bench.comparison import Quantity, ratio, ratio_lines, ratios, to_dict
from tests.support.rounds import broken, result_of

LENGTHS = (0.1, 1.0, 10.0)


def test_a_p50_is_the_median_of_paired_ratios_and_not_the_ratio_of_medians() -> None:
    """Side a takes 0.5 of side b by prompt, but 1.5 on a third prompt of three."""
    made = result_of(6, 3, lambda side, r, i: LENGTHS[i] * (1 if side == "b" else 1.5 if i == r % 3 else 0.5))
    found = ratio(made, "b", Quantity("ttft", 50))
    assert found.interval is not None and found.interval.estimate == pytest.approx(0.5)
    assert found.line() == "ttft_p50: 0.5x b [0.5, 0.5]: lower"


def test_an_interval_spans_the_rounds() -> None:
    factors = (0.9, 1.1, 1.0, 0.8, 1.2, 1.05)
    made = result_of(6, 5, lambda side, r, i: factors[r] if side == "a" else 1.0)
    found = ratio(made, "b", Quantity("ttft", 50)).interval
    assert found is not None and (found.low, found.high) == pytest.approx((0.8, 1.2))
    assert "no difference shown" in ratio(made, "b", Quantity("ttft", 50)).line()


def test_too_few_rounds_or_requests_are_refused() -> None:
    five = result_of(5, 20, lambda side, r, i: 1.0)
    assert "needs 6 rounds, 5" in ratio(five, "b", Quantity("ttft", 50)).line()
    assert ratio_lines(ratios(five)) == ["no intervals: an interval needs 6 rounds, 5 were run (--rounds 6)"]
    few = result_of(6, 9, lambda side, r, i: 1.0)
    assert "p95 needs 59 requests, 54" in ratio(few, "b", Quantity("ttft", 95)).line()
    enough = result_of(6, 10, lambda side, r, i: 1.0)
    assert ratio(enough, "b", Quantity("ttft", 95)).interval is not None
    assert ratio(enough, "b", Quantity("output_throughput")).interval is not None


def test_rounds_without_answers_have_no_interval() -> None:
    made = result_of(6, 10, lambda side, r, i: 1.0)
    made.turns[0].records[:] = [broken(i) for i in range(10)]
    found = ratio(made, "b", Quantity("ttft", 50))
    assert found.interval is None and found.to_dict() == {"not_shown": "a round has no value"}


def test_all_ratios_are_saved() -> None:
    saved = to_dict(ratios(result_of(6, 10, lambda side, r, i: 1.0 if side == "a" else 2.0)))
    assert saved["b"]["ttft_p50"] == pytest.approx(
        {"low": 0.5, "ratio": 0.5, "high": 0.5, "rounds": 6, "confidence": 0.95}
    )
    assert ratios(result_of(6, 2, lambda side, r, i: 1.0, sides=("a",))) == []


def test_quantities_have_the_names_of_the_table() -> None:
    assert Quantity("ttft", 95).name == "ttft_p95" and Quantity("itl_mean", 50).name == "itl_mean_p50"
    assert Quantity("e2e").name == "e2e_mean" and Quantity("e2e", 99.9).name == "e2e_p99.9"
    assert Quantity("output_throughput").is_rate and Quantity("output_throughput").name == "output_throughput"

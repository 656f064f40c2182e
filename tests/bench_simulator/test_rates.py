"""The verdicts of the comparison of simulated and measured latencies."""

from __future__ import annotations

import math

import pytest

from bench.simulator.rates import NUMBERS, at, line, missed_numbers, ratios


def row(load: float, ratio: float) -> dict[str, object]:
    """A row whose numbers are all simulated as ``ratio`` of the measured."""
    rounds = [
        {
            "load": load,
            "simulated": dict.fromkeys(NUMBERS, ratio * value),
            "steady": dict.fromkeys(NUMBERS, value),
            "measured": dict.fromkeys(NUMBERS, value),
        }
        for value in (1.0, 2.0, 4.0)
    ]
    return {"share": load} | ratios(rounds)


def test_a_ratio_is_the_geometric_mean_over_rounds_with_an_interval() -> None:
    sides = {"simulated": [1.0, 2.0, 4.0], "steady": [2.0, 2.0, 2.0], "measured": [2.0, 2.0, 2.0]}
    rounds = [
        {"load": 0.5 + 0.1 * i} | {side: dict.fromkeys(NUMBERS, values[i]) for side, values in sides.items()}
        for i in range(3)
    ]
    found = ratios(rounds)
    assert found["load"] == pytest.approx(0.7)
    for name in NUMBERS:
        assert found[name]["value"] == pytest.approx(1.0)
        half = 4.303 * math.log(2) / math.sqrt(3)  # Student's t of two degrees of freedom
        assert found[name]["high"] == pytest.approx(math.exp(half), rel=1e-3)


def test_errors_count_below_four_fifths_of_the_capacity() -> None:
    assert len(missed_numbers(row(0.7, 0.84))) == len(missed_numbers(row(0.7, math.nan))) == len(NUMBERS)
    assert missed_numbers(row(0.7, 1.14)) == missed_numbers(row(0.85, 1.9)) == []
    assert at({"a": {"b": 2}}, ("a", "b")) == 2.0
    assert "ttft_p95_ms 0.840 [0.840, 0.840]" in line(row(0.7, 0.84))

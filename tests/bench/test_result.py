"""Results of paired runs: medians and ratios over rounds, SLO misses, saved files."""

from __future__ import annotations

import json

import pytest

from optkit.bench.result import BenchResult, spread
from tests.support.paired_run import made


def test_problems_names_a_busy_machine():
    result = made()
    result.environment = {"load_average": 3.0, "cores": 2}
    assert result.problems() == ["the machine was busy: load average 3.0 on 2 cores"]
    result.environment = {"load_average": 0.4, "cores": 2}
    assert result.problems() == []


def test_statistic_and_ratio_are_taken_over_rounds():
    path = ("latency_ms", "ttft", "p50")
    assert made().statistic("a", path) == pytest.approx({"median": 2000, "q1": 1500, "q3": 2500})
    assert made().ratio("b", path)["median"] == pytest.approx(1 / 3)  # of 1/2, 1/3, 1/4
    assert spread([1.0, None]) is None
    assert made().ratio("b", ("no", "such")) is None


def test_slo_misses_counts_the_first_side_only():
    assert made().slo_misses() == ["p95 ttft 2900.0 ms > 2500 ms"]


def test_from_dict_gives_an_equal_result_when_a_result_was_saved(tmp_path):
    made().save(tmp_path / "deep" / "result.json")
    data = json.loads((tmp_path / "deep" / "result.json").read_text())
    assert data["comparison"]["latency_ms.ttft.p50"]["ratio"]["b"]["median"] == pytest.approx(1 / 3)
    again = BenchResult.from_dict(data)
    assert again == made()
    again.definitions = "guidellm"
    assert again.rounds("a")[0]["latency_ms"]["tpot"]["p50"] == pytest.approx(550)  # includes TTFT

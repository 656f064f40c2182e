"""Charts of rows: quartiles and parts are those of the numbers."""

from __future__ import annotations

import math
import re
from statistics import quantiles

import pytest

from optkit.bench.statistics import samples_needed
from optkit.pages.html import Markup
from optkit.pages.row_charts import (
    ENOUGH_FOR_P95,
    Bar,
    Pair,
    Samples,
    distribution_chart,
    pair_chart,
    stacked_chart,
)
from optkit.pages.svg import EDGE, WIDTH
from tests.support.parsed_page import ParsedPage


def test_a_distribution_shows_quartiles_and_calls_the_largest_of_few_samples_so() -> None:
    values = [float(v) for v in range(1, 12)]
    chart = distribution_chart("t", "ms", [Samples("side", values)])
    q1, q2, q3 = quantiles(values, n=4, method="inclusive")
    cells = re.findall(r"<td>([^<]*)</td>", chart)
    assert cells == ["side", "11", "1", f"{q1:g}", f"{q2:g}", f"{q3:g}", "-", "11"]
    assert "p50 6, max 11" in chart
    assert samples_needed(95) == ENOUGH_FOR_P95
    many = [float(v) for v in range(1, ENOUGH_FOR_P95 + 1)]
    assert "p50 30, p95 56.1" in distribution_chart("t", "ms", [Samples("side", many)])


def test_rows_without_finite_samples_are_left_out() -> None:
    rows = [Samples("a", [math.nan]), Samples("b", [1.0, math.inf])]
    chart = distribution_chart("t", "ms", rows)
    assert ">b<" in chart and ">a<" not in chart
    assert distribution_chart("t", "ms", rows[:1]) == distribution_chart("t", "ms", []) == Markup("")


def test_parts_of_a_bar_are_as_long_as_their_numbers() -> None:
    chart = stacked_chart("t", "ms", ["a", "b", "c"], [Bar("row", [1.0, 3.0, math.nan], "4 ms")])
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', chart)]
    assert len(widths) == 2
    assert widths[1] / widths[0] == pytest.approx(3, rel=0.02)
    assert sum(widths) == pytest.approx((WIDTH - 2 * EDGE) / 1.05, abs=2)
    assert {">1 a<", ">2 b<", ">1<", ">2<"} <= set(re.findall(r">[^<]+<", chart))


@pytest.mark.parametrize("parts", [[], [0.0], [math.nan], [math.inf]])
def test_bars_without_numbers_are_no_chart(parts: list[float]) -> None:
    assert stacked_chart("t", "ms", ["a"], [Bar("row", parts, "")]) == Markup("")


def test_a_pair_has_a_hollow_and_a_filled_marker() -> None:
    pairs = [Pair("one", 2.0, 1.0), Pair("two", None, 3.0), Pair("three", math.nan, -1.0)]
    chart = pair_chart("t", "speedup", ("predicted", "measured"), pairs, mark=1.0)
    assert chart.count("hollow") == 1 and "2 / 1" in chart and "- / 3" in chart
    ParsedPage(chart).assert_self_contained()
    assert pair_chart("t", "x", ("a", "b"), [Pair("none", None, None)], mark=1.0) == Markup("")


def test_names_are_cut_and_escaped() -> None:
    name = "<script>" + "n" * 300
    for chart in (
        distribution_chart(name, name, [Samples(name, [1.0])]),
        stacked_chart(name, name, [name, name], [Bar(name, [1.0, 1.0], name)]),
        pair_chart(name, name, (name, name), [Pair(name, 1.0, 2.0)]),
    ):
        assert "script" not in ParsedPage(chart).tags
        assert max(map(len, re.findall(r"<text[^>]*>([^<]*)</text>", chart))) < 80 or "…" in chart

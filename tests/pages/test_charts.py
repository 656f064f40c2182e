"""Charts of two axes: places of points, and series that differ without colour."""

from __future__ import annotations

import math
import re

import pytest

from optkit.pages.charts import LEFT, PLOT, RIGHT, Series, xy_chart
from optkit.pages.html import Markup
from optkit.pages.svg import LINE, MOST_DOTS, STYLES, WIDTH, legend_of, thinned
from tests.support.parsed_page import ParsedPage


def places(chart: str, style: int) -> list[tuple[float, float]]:
    """The markers of a series."""
    (path,) = re.findall(rf'<path d="([^"]*)" class="dots s{style}"', chart)
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+),([\d.]+)m", path)]


def test_points_stand_where_their_numbers_say() -> None:
    chart = xy_chart(
        "t", "x", "y", [Series("a", [(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)])], log_x=False, log_y=False
    )
    (x0, y0), (x1, y1), (x2, y2) = places(chart, 0)
    assert (x0, y0) == (LEFT, LINE + 4 + PLOT)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1
    assert x2 == round(LEFT + (WIDTH - LEFT - RIGHT) / 1.05, 1)


def test_numbers_that_are_not_finite_break_nothing() -> None:
    points = [(1.0, math.nan), (math.inf, 1.0), (2.0, 2.0)]
    chart = xy_chart("t", "x", "y", [Series("a", points), Series("b", [(math.nan, math.nan)], 1)])
    assert len(places(chart, 0)) == 1 and "nan" not in chart.partition("<details>")[0]
    assert xy_chart("t", "x", "y", [Series("a", points[:2])]) == Markup("")
    assert xy_chart("t", "x", "y", []) == Markup("")


def test_a_chart_has_a_name_for_screen_readers_and_its_numbers_as_a_table() -> None:
    attack = '"><script>'
    parsed = ParsedPage(xy_chart(attack, attack, attack, [Series(attack, [(1.0, 2.0)])]))
    assert {"svg", "figcaption", "table", "details"} <= parsed.tags and "script" not in parsed.tags
    assert {"role", "aria-label"} <= parsed.attributes and attack in parsed.words
    parsed.assert_self_contained()


def test_series_differ_in_marker_and_dash() -> None:
    series = [Series(str(i), [(1.0, float(i + 1)), (2.0, float(i + 2))], i) for i in range(STYLES)]
    chart = xy_chart("t", "x", "y", series)
    lines = set(re.findall(r'class="line s\d"( stroke-dasharray="[^"]*")?>', chart))
    shapes = {
        re.sub(r"M[\d.]+,[\d.]+", "", path) for path in re.findall(r'<path d="(M[^"]*z)" class="dots', chart)
    }
    assert len(lines) == STYLES and len({shape[: len(shape) // 2] for shape in shapes}) >= STYLES


def test_a_long_series_is_thinned_evenly_with_its_ends() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) == MOST_DOTS and kept[0] == points[0] and kept[-1] == points[-1]


def test_a_legend_stays_within_the_chart() -> None:
    parts, height = legend_of(
        [("a very long name of a side" * 9, 0), ("b" * 30, 1), ("c" * 30, 2), ("d", None)]
    )
    assert height > 3 * 12
    assert all(float(x) < WIDTH for x in re.findall(r'x="([\d.]+)"', "".join(parts)))

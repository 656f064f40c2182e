"""Charts with a row for each subject: distributions, stacked bars, pairs of numbers.

Names stand above their rows, so long names need no margin. Infinite numbers and NaN are left out; a chart without
finite numbers is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from optkit.pages.axes import Axis, axis_of
from optkit.pages.html import Markup, tag
from optkit.pages.numbers import number, tick
from optkit.pages.svg import (
    BOLD_LETTER,
    BOTTOM,
    EDGE,
    LETTER,
    STYLES,
    TOP,
    WIDTH,
    Numbers,
    figure,
    legend_of,
    markers,
    shortened,
    swatches,
    text,
    thinned,
)

ROW = 40.0  # height
ENOUGH_FOR_P95 = 59  # samples: fewer may all lie below the true p95 in one of twenty runs


@dataclass(frozen=True)
class Samples:
    """The samples of a row."""

    name: str
    values: Sequence[float]
    style: int = 0


def distribution_chart(title: str, label: str, rows: Sequence[Samples], note: str = "") -> Markup:
    """Each sample as a dot, with a bar between the quartiles, and ticks at median and p95.

    With fewer than ``ENOUGH_FOR_P95`` samples the largest sample stands in for the p95, by the name max.
    """
    kept = [Samples(row.name, [v for v in row.values if isfinite(v)], row.style) for row in rows]
    kept = [row for row in kept if row.values]
    axis = axis_of(label, (value for row in kept for value in row.values))
    if axis is None:
        return Markup("")
    height, parts = ROW + 6, []
    table = []
    for i, row in enumerate(kept):
        y = 14 + i * height
        q1, median, q3, p95 = (float(value) for value in np.percentile(row.values, (25, 50, 75, 95)))
        enough = len(row.values) >= ENOUGH_FOR_P95
        told = f"p50 {number(median)}, " + (
            f"p95 {number(p95)}" if enough else f"max {number(max(row.values))}"
        )
        parts += row_heading(y, row.name, told)
        parts += distribution_row(axis, row, y + 18, (q1, median, q3, p95 if enough else max(row.values)))
        least, most = min(row.values), max(row.values)
        cells = (least, q1, median, q3, p95 if enough else None, most)
        table.append((row.name, str(len(row.values)), *map(number, cells)))
    bottom = 8 + height * len(kept)
    header = (label, "samples", "least", "q1", "p50", "q3", "p95", "most")
    parts += bottom_axis(axis, bottom)
    return figure(title, bottom + BOTTOM, parts, Numbers(header, table), note)


def distribution_row(
    axis: Axis, row: Samples, y: float, marks: tuple[float, float, float, float]
) -> Iterator[Markup]:
    q1, median, q3, p95 = (along(axis, value) for value in marks)
    css = f"s{row.style % STYLES}"
    yield tag("rect", x=q1, y=y - 9, width=max(1.5, q3 - q1), height=18, class_=f"box {css}")
    ordered = [(value, 0.0) for value in sorted(row.values)]
    dots = [(along(axis, value), y + jitter(i)) for i, (value, _) in enumerate(thinned(ordered))]
    yield markers(dots, row.style, "faint")
    yield tag("line", x1=median, x2=median, y1=y - 11, y2=y + 11, class_="median")
    yield tag("line", x1=p95, x2=p95, y1=y - 8, y2=y + 8, class_="tail")


def jitter(index: int) -> float:
    """-7 to 7 units across a row, spread evenly over neighbours (the golden ratio's sequence)."""
    return 14 * ((index * 0.618034) % 1.0) - 7


def row_heading(y: float, name: str, told: str) -> list[Markup]:
    """The name of a row at the left, the numbers at the right."""
    room = WIDTH - 2 * EDGE - LETTER * (len(told) + 2)
    return [text(EDGE, y, shortened(name, room, BOLD_LETTER), css="name"), text(WIDTH - EDGE, y, told, "end")]


def along(axis: Axis, value: float) -> float:
    """The horizontal place of ``value`` in a chart of rows."""
    return EDGE + (WIDTH - 2 * EDGE) * axis.share(value)


def bottom_axis(axis: Axis, y: float) -> Iterator[Markup]:
    """The axis below rows, with ticks inside of the edges."""
    yield tag("line", x1=EDGE, x2=WIDTH - EDGE, y1=y, y2=y, class_="axis")
    for value in axis.ticks():
        x, words = along(axis, value), tick(value)
        half = LETTER * len(words) / 2
        yield tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis")
        yield text(min(max(x, half), WIDTH - half), y + 15, words, "middle")
    yield text(WIDTH - EDGE, y + 30, shortened(axis.label, WIDTH), "end", "label")


# -- bars and pairs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A row of parts in the order of the legend; ``told`` is the text at the right."""

    name: str
    parts: Sequence[float]
    told: str


def stacked_chart(
    title: str, label: str, names: Sequence[str], bars: Sequence[Bar], *, note: str = "", scale: float = 1.0
) -> Markup:
    """Bars of parts; the parts have numbers, in the legend too. The table shows the parts times ``scale``."""
    kept = [
        Bar(bar.name, [max(0.0, part) if isfinite(part) else 0.0 for part in bar.parts], bar.told)
        for bar in bars
    ]
    axis = axis_of(label, (sum(bar.parts) for bar in kept), log=False)
    if axis is None or not any(sum(bar.parts) for bar in kept):
        return Markup("")
    numbered = [f"{i} {name}" for i, name in enumerate(names, 1)]
    legend, top = swatches(numbered) if len(names) > 1 else ([], TOP)
    parts = list(legend)
    for row, bar in enumerate(kept):
        y = top + 14 + row * ROW
        parts += [*row_heading(y, bar.name, bar.told), *segments(axis, bar, y + 6, len(names) > 1)]
    bottom = top + 6 + ROW * len(kept)
    parts += bottom_axis(axis, bottom)
    table = [(bar.name, *(number(part * scale) for part in bar.parts)) for bar in kept]
    return figure(title, bottom + BOTTOM, parts, Numbers((label, *names), table), note)


def segments(axis: Axis, bar: Bar, y: float, numbered: bool) -> Iterator[Markup]:
    start = 0.0
    for i, part in enumerate(bar.parts):
        x, end = along(axis, start), along(axis, start + part)
        start += part
        if end - x < 0.2:
            continue
        yield tag("rect", x=x, y=y, width=max(0.5, end - x - 0.7), height=16, class_=f"bar s{i % STYLES}")
        if numbered and end - x > 11:
            yield text((x + end) / 2, y + 12, str(i + 1), "middle", "inside")


@dataclass(frozen=True)
class Pair:
    """Two numbers of a row; None for an unknown number."""

    name: str
    first: float | None
    second: float | None


def pair_chart(
    title: str,
    label: str,
    names: tuple[str, str],
    pairs: Sequence[Pair],
    *,
    mark: float | None = None,
    note: str = "",
) -> Markup:
    """Two numbers a row on a logarithmic axis, a hollow and a filled marker with a line between.

    Args:
        mark: the value of a vertical line, as 1 for "no change".
    """
    known = [v for pair in pairs for v in (pair.first, pair.second) if v is not None]
    axis = axis_of(label, known + ([] if mark is None else [mark]), log=True)
    if axis is None or not known:
        return Markup("")
    legend, top = legend_of([(names[0], 3), (names[1], 0)])
    parts, height = list(legend), 30.0
    bottom = top + 2 + height * len(pairs)
    for row, pair in enumerate(pairs):
        y = top + 12 + row * height
        told = " / ".join(number(value) for value in (pair.first, pair.second))
        parts += row_heading(y, pair.name, told)
        if mark is not None:
            x = along(axis, mark)
            parts.append(tag("line", x1=x, x2=x, y1=y + 3, y2=y + 15, class_="mark"))
        parts += pair_row(axis, pair, y + 9)
    parts += bottom_axis(axis, bottom)
    table = [(pair.name, number(pair.first), number(pair.second)) for pair in pairs]
    return figure(title, bottom + BOTTOM, parts, Numbers((label, *names), table), note)


def pair_row(axis: Axis, pair: Pair, y: float) -> Iterator[Markup]:
    places = [None if v is None or not axis.shows(v) else along(axis, v) for v in (pair.first, pair.second)]
    first, second = places
    if first is not None and second is not None:
        yield tag("line", x1=first, x2=second, y1=y, y2=y, class_="between")
    if first is not None:
        yield markers([(first, y)], 3, "hollow")
    if second is not None:
        yield markers([(second, y)], 0)

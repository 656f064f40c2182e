"""Charts of points and lines over two axes. A chart without finite numbers is empty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from optkit.pages.axes import Axis, axis_of
from optkit.pages.html import Markup, tag
from optkit.pages.numbers import number, tick
from optkit.pages.svg import (
    BOTTOM,
    DASHES,
    EDGE,
    LINE,
    STYLES,
    WIDTH,
    Numbers,
    figure,
    legend_of,
    markers,
    shortened,
    text,
    thinned,
)

LEFT, RIGHT = 46.0, 10.0  # margins
PLOT = 190.0  # height between the axes


@dataclass(frozen=True)
class Series:
    """Points of a chart. ``style`` chooses colour, marker and dash; None is a limit: a grey line without markers."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int | None = 0
    line: bool = True
    dots: bool = True


def xy_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    note: str = "",
    log_x: bool | None = None,
    log_y: bool | None = None,
    zero_y: bool = True,
) -> Markup:
    """A chart of series over two axes, with a legend where there are several."""
    points = [point for one in series for point in one.points if all(map(isfinite, point))]
    x = axis_of(x_label, (point[0] for point in points), log=log_x)
    y = axis_of(y_label, (point[1] for point in points), log=log_y, zero=zero_y)
    if x is None or y is None:
        return Markup("")
    shown = [one for one in series if any(x.shows(a) and y.shows(b) for a, b in one.points)]
    rows = [(one.name, number(a), number(b)) for one in shown for a, b in thinned(one.points) if isfinite(a)]
    legend, top = legend_of([(one.name, one.style) for one in shown]) if len(shown) > 1 else ([], 0.0)
    top += LINE + 4  # of the label of the vertical axis
    frame = Frame(x, y, top)
    parts = [*legend, *frame.axes(), *(part for one in shown for part in frame.series(one))]
    return figure(title, top + PLOT + BOTTOM, parts, Numbers(("series", x_label, y_label), rows), note)


@dataclass(frozen=True)
class Frame:
    """The area between two axes, ``top`` units below the edge."""

    x: Axis
    y: Axis
    top: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * self.x.share(x),
            self.top + PLOT * (1 - self.y.share(y)),
        )

    def axes(self) -> Iterator[Markup]:
        """Lines of the grid, ticks and labels."""
        bottom, right = self.top + PLOT, WIDTH - RIGHT
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            yield tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid")
            yield text(LEFT - 5, y + 4, tick(value), "end")
        for value in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            yield tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
            yield text(x, bottom + 15, tick(value), "middle")
        yield tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")
        yield text(right, bottom + 31, shortened(self.x.label, right - LEFT), "end", "label")
        yield text(EDGE, self.top - 8, shortened(self.y.label, right - LEFT), css="label")

    def series(self, one: Series) -> Iterator[Markup]:
        """The line and the markers of a series."""
        places = [self.at(x, y) for x, y in one.points if self.x.shows(x) and self.y.shows(y)]
        css = "limit" if one.style is None else f"s{one.style % STYLES}"
        if one.line and len(places) > 1:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
            dash = None if one.style is None else DASHES[one.style % STYLES]
            yield tag("path", d=path, class_=f"line {css}", stroke_dasharray=dash)
        if one.dots and one.style is not None:
            yield markers(thinned(places), one.style)

"""The parts of charts as inline SVG: frame, texts, markers, legends, and the table of the numbers.

A chart is ``WIDTH`` units wide, as wide as a phone shows at full size, and wider screens have several columns. Series
differ in colour, marker and dash, never in colour alone. Below each chart is a table of the numbers, for screen
readers, for paper, and for exact values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optkit.pages.html import Markup, details, html_table, tag

WIDTH = 360.0
EDGE, TOP, BOTTOM = 6.0, 8.0, 36.0  # margins at the sides, above and below
LETTER, BOLD_LETTER = 6.8, 7.7  # width of a letter in the widest usual fonts, about
LINE = 16.0  # height of a line of text
MOST_DOTS = 300  # of a series: more are thinned evenly
STYLES = 8  # colours, markers and dashes, then again
MARKERS = (
    "m-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0z",
    "m-2.6,-2.6h5.2v5.2h-5.2z",
    "m0,-3.6l3.4,6h-6.8z",
    "m0,-3.8l3.8,3.8l-3.8,3.8l-3.8,-3.8z",
    "m0,3.6l3.4,-6h-6.8z",
    "m-3,-1h2v-2h2v2h2v2h-2v2h-2v-2h-2z",
    "m-3.2,-3.2h6.4l-6.4,6.4h6.4z",
    "m-3.6,-1.2h7.2v2.4h-7.2z",
)
DASHES = (None, "6 3", "2 3", "8 3 2 3", "1 3", "10 4", "5 2 1 2", "3 6")

Rows = Iterable[Sequence[str]]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a chart as a table."""

    header: Sequence[str]
    rows: Rows = field(default_factory=list)


def figure(title: str, height: float, parts: Iterable[Markup], numbers: Numbers, note: str = "") -> Markup:
    """A chart with title, and the table of the numbers behind a click."""
    told = (
        f"{title}. {note} The numbers are in the table below."
        if note
        else f"{title}. The numbers are in the table below."
    )
    drawing = tag(
        "svg", *parts, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=told, class_="chart"
    )
    caption = tag("figcaption", tag("b", title), f" {note}" if note else None)
    table = tag("div", html_table(numbers.header, numbers.rows), class_="scroll")
    return tag("figure", caption, drawing, details("Numbers", table))


def grid(charts: Iterable[Markup]) -> Markup:
    """Charts in columns, as the width allows; empty charts are left out."""
    shown = [chart for chart in charts if chart]
    return tag("div", *shown, class_="charts") if shown else Markup("")


def text(x: float, y: float, words: str, anchor: str = "start", css: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor if anchor != "start" else None, class_=css)


def shortened(words: str, width: float, letter: float = LETTER) -> str:
    """``words`` within ``width`` units, cut at the end."""
    most = max(1, int(width / letter))
    return words if len(words) <= most else f"{words[: most - 1]}…"


def markers(places: Iterable[tuple[float, float]], style: int, css: str = "") -> Markup:
    """All markers of a series, as a single path."""
    marker = MARKERS[style % STYLES]
    path = "".join(f"M{x:.1f},{y:.1f}{marker}" for x, y in places)
    return tag("path", d=path, class_=f"dots s{style % STYLES} {css}".strip())


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST_DOTS`` of ``points``, evenly, the first and the last among them."""
    if len(points) <= MOST_DOTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (MOST_DOTS - 1))] for i in range(MOST_DOTS)]


def legend_of(names: Sequence[tuple[str, int | None]]) -> tuple[list[Markup], float]:
    """The entries of a legend, wrapped into lines, and the height."""
    parts, x, y = [], EDGE, 12.0
    for name, style in names:
        label = shortened(name, WIDTH - 40)
        width = 28 + LETTER * len(label) + 8
        if x > EDGE and x + width > WIDTH:
            x, y = EDGE, y + LINE
        css = "limit" if style is None else f"s{style % STYLES}"
        dash = None if style is None else DASHES[style % STYLES]
        parts.append(tag("path", d=f"M{x:.1f},{y - 4:.1f}h22", class_=f"line {css}", stroke_dasharray=dash))
        if style is not None:
            parts.append(markers([(x + 11, y - 4)], style))
        parts.append(text(x + 27, y, label))
        x += width
    return parts, y + 10


def swatches(names: Sequence[str]) -> tuple[list[Markup], float]:
    parts, x, y = [], EDGE, 12.0
    for i, name in enumerate(names):
        label = shortened(name, WIDTH - 30)
        width = 18 + LETTER * len(label) + 8
        if x > EDGE and x + width > WIDTH:
            x, y = EDGE, y + LINE
        parts += [
            tag("rect", x=x, y=y - 9, width=12, height=10, class_=f"bar s{i % STYLES}"),
            text(x + 17, y, label),
        ]
        x += width
    return parts, y + 6

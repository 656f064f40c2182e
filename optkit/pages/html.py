"""HTML elements, with every plain text escaped: only ``Markup`` enters a page unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = {"meta"}


class Markup(str):
    """Text in HTML, made by the functions of ``optkit.pages`` alone."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element. Plain children and all attributes are escaped; None is left out.

    Underscores in names of attributes become hyphens; an underscore at the end is dropped (``class_``).
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(child for child in children if child is not None)}</{name}>")


def attribute(value: str | float) -> str:
    """The text of an attribute; coordinates have two decimals at most."""
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """``parts`` in a row, plain text escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(name: str, text: str, css: str = "") -> Markup:
    """An element with a text and a class."""
    return tag(name, text, class_=css or None)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Markup:
    """A table; a cell is plain text or ``Markup``. The first column heads the row."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    lines = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    title = tag("caption", caption) if caption else None
    return tag("table", title, tag("thead", head), tag("tbody", Markup("\n"), join(lines, "\n")))


def wide_table(header: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> Markup:
    """A table with a scroll bar of the table alone on narrow pages; ``label`` is the name for screen readers."""
    return tag(
        "div", html_table(header, rows), class_="scroll", role="region", aria_label=label, tabindex="0"
    )


def prose_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table with sentences; a phone shows each row as a block, each cell behind the heading of its column.

    By the roles, screen readers find a table in both forms.
    """
    head = tag("tr", *(tag("th", cell, scope="col", role="columnheader") for cell in header), role="row")
    lines = [
        tag(
            "tr",
            *(tag("td", cell, role="cell", data_label=name) for name, cell in zip(header, row, strict=True)),
            role="row",
        )
        for row in rows
    ]
    body = tag("tbody", Markup("\n"), join(lines, "\n"), role="rowgroup")
    return tag("table", tag("thead", head, role="rowgroup"), body, class_="prose", role="table")


def paragraph(text: str, css: str = "") -> Markup:
    return element("p", text, css)


def items(texts: Iterable[str], css: str = "") -> Markup:
    """A list with a bullet for each text."""
    return tag("ul", *(tag("li", text) for text in texts), class_=css or None)


def details(summary: str, *children: str) -> Markup:
    """A part opened by a click or the Enter key; open on paper."""
    return tag("details", tag("summary", summary), *children)

"""Tables of results in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optkit.pages.html import element, html_table
from optkit.report.rich_cells import cells, plain

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["element", "fragment", "html_table", "of_table"]


def of_table(table: Table) -> str:
    """A table of the terminal as HTML, with the same cells."""
    caption = element("p", plain(table.caption)) if table.caption else ""
    return html_table(*cells(table)) + caption


def fragment(title: str, parts: Iterable[str], notes: Sequence[str] = ()) -> str:
    """HTML with a title, ``parts`` in HTML, and a paragraph for each of ``notes``, which are plain text."""
    return "\n".join([element("h4", title), *parts, *(element("p", note) for note in notes)])

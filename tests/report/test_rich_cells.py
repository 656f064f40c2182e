"""Cells of a terminal's table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from optkit.report.rich_cells import cells


def test_cells_are_plain_text_in_rows() -> None:
    table = Table("a", "b")
    table.add_row(Text("[bold]x", style="red"), "1")
    table.add_row("y", "2")
    assert cells(table) == (["a", "b"], [("[bold]x", "1"), ("y", "2")])

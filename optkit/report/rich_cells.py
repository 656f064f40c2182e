"""The cells of a terminal's table, for pages with the same table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text


def cells(table: Table) -> tuple[list[str], list[tuple[str, ...]]]:
    """The header and the rows as plain text."""
    header = [plain(column.header) for column in table.columns]
    columns = ([plain(cell) for cell in column.cells] for column in table.columns)
    return header, list(zip(*columns, strict=True))


def plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)

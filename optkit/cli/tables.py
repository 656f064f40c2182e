"""Tables without loss: no cell is cut and no word is split, in a terminal of any width.

==================================  =========================================================================
output                              layout
==================================  =========================================================================
no terminal (a pipe, a CI log)      a line per row, as wide as the cells
a wide enough terminal              the same
too narrow for the last column      the last column is wrapped between words
too narrow for the other columns    a block per row: the first cell, then a line for each further column
==================================  =========================================================================
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optkit.cli import console

UNLIMITED = 1 << 20  # columns
MIN_PROSE_COLUMNS = 24  # columns, the least width of a wrapped last column


def print_table(table: Table, output: Console | None = None) -> None:
    """Print ``table`` on stdout, or on ``output``."""
    output = output or console.stdout
    natural = Measurement.get(output, output.options.update(max_width=UNLIMITED), table).maximum
    if not output.is_terminal or natural <= output.width:
        _print_grid(table, output, natural)
    elif table.columns and _wrapped_width(table, output, natural) >= MIN_PROSE_COLUMNS:
        table.columns[-1].width = _wrapped_width(table, output, natural)
        table.columns[-1].overflow = "fold"
        _print_grid(table, output, output.width)
    else:
        _print_blocks(table, output)


def _print_grid(table: Table, output: Console, width: int) -> None:
    for column in table.columns[:-1]:
        column.no_wrap = True
    options = output.options.update(width=width, max_width=width)
    for segments in output.render_lines(table, options, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        output.print(line, soft_wrap=True)  # a plain print() cuts at the width of the terminal


def _wrapped_width(table: Table, output: Console, natural: int) -> int:
    """Columns left for the last column; 0 if a word there is longer, since a block shows the word whole."""
    last = Table.grid(table.columns[-1])
    measured = Measurement.get(output, output.options.update(max_width=UNLIMITED), last)
    left = output.width - (natural - measured.maximum)
    return left if measured.minimum <= left else 0


def _print_blocks(table: Table, output: Console) -> None:
    """Print each row as lines: the first cell under its heading, then each further cell behind its heading."""
    if table.title:
        output.print(table.title, style="italic", soft_wrap=True)
    names = [_text(output, column.header) for column in table.columns]
    width = max((name.cell_len for name in names[1:]), default=0)
    rows = zip(*([_text(output, cell) for cell in column.cells] for column in table.columns), strict=True)
    for first, *others in rows:
        output.print(Text(" ").join(part for part in (names[0], first) if part), style="bold", soft_wrap=True)
        for name, cell in zip(names[1:], others, strict=True):
            label = f"  {name.plain}{' ' * (width - name.cell_len)}  "
            longest = max(map(cell_len, cell.plain.split()), default=1)
            for line in cell.wrap(output, max(output.width - len(label), longest)):
                output.print(Text(label) + line, soft_wrap=True)
                label = " " * len(label)
    if table.caption:
        output.print(table.caption, style="italic", soft_wrap=True)


def _text(output: Console, cell: object) -> Text:
    return cell.copy() if isinstance(cell, Text) else output.render_str(str(cell))

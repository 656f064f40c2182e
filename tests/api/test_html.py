"""Tables in notebooks."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from optkit.api.html import fragment, of_table


def test_of_table_has_the_cells_of_the_terminal_escaped() -> None:
    table = Table("a", "b & c", caption="note")
    table.add_row("1 < 2", Text("x", style="red"))
    html = of_table(table)
    assert '<th scope="col">a</th><th scope="col">b &amp; c</th>' in html
    assert "<td>1 &lt; 2</td><td>x</td>" in html and html.endswith("<p>note</p>")


def test_fragment_puts_notes_below_the_parts() -> None:
    assert fragment("t<", ["<table></table>"], ["n&"]) == "<h4>t&lt;</h4>\n<table></table>\n<p>n&amp;</p>"

"""The table of optkit bench: its rows, columns and legend."""

from __future__ import annotations

from optkit.bench.table import legend, rows, table
from tests.support.paired_run import made


def test_table_has_a_row_per_number_and_legend_a_formula_per_metric():
    result = made()
    assert table(result).row_count == len(rows(result))
    assert [c.header for c in table(result).columns] == ["", "a", "b", "x b"]
    assert any("(done - first) / (n - 1)" in line for line in legend(result))

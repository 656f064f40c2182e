"""The table of optkit bench: its rows, columns and legend."""

from __future__ import annotations

from optkit.bench.table import legend, rows, table
from tests.support.paired_run import made
from tests.support.rounds import result_of


def test_table_has_a_row_per_number_and_legend_a_formula_per_metric():
    result = made()
    assert table(result).row_count == len(rows(result))
    assert [c.header for c in table(result).columns] == ["", "a", "b", "x b"]
    assert any("(done - first) / (n - 1)" in line for line in legend(result))


def test_a_percentile_is_not_shown_below_its_sample_size():
    few = result_of(2, 29, lambda side, r, i: 1.0)
    enough = result_of(2, 30, lambda side, r, i: 1.0)
    many = result_of(2, 150, lambda side, r, i: 1.0)
    assert (
        "TTFT p95 ms" not in [label for label, _ in rows(few)] and cells_of(few, "TTFT p50 ms")[0] == "1000"
    )
    assert cells_of(enough, "TTFT p95 ms")[0] == "1000"
    assert any("59 requests" in line for line in legend(few))
    assert not any("59 requests" in line for line in legend(enough))
    labels = ["TTFT p99 ms" in [label for label, _ in rows(result)] for result in (few, enough, many)]
    assert labels == [False, False, True]


def cells_of(result, label):
    """The cells of a row, without its label."""
    grid = table(result)
    at = [name for name, _ in rows(result)].index(label)
    return [list(column.cells)[at] for column in grid.columns[1:]]

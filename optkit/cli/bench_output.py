"""The output of ``optkit bench``: warnings and verdicts on stderr, a table or JSON on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.extras import need_extra

if TYPE_CHECKING:
    from optkit.api.bench import BenchReport
    from optkit.bench.rates import FoundRate, Sweep

MOST_PROBLEMS = 10  # lines; the saved result has all


def print_report(report: BenchReport, as_json: bool) -> None:
    """Print the report of a single load."""
    need_extra("serve", "optkit bench")
    from optkit.bench.table import legend, table

    result = report.result
    doubts = result.validity().doubts
    for line in [line for line in result.problems() if line not in doubts][:MOST_PROBLEMS]:
        console.warn(line)
    for doubt in doubts:
        console.warn(f"do not trust this: {doubt}")
    if as_json:
        console.print_json(result.to_dict())
    else:
        print_table(table(result))
        for line in legend(result):
            console.stdout.print(line, style="dim")
    for line in result.slo_misses():
        console.stderr.print(f"SLO missed: {line}", style="bold red")
    for checked in report.assertions:
        style = "green" if checked.held else "bold red" if checked.outcome == "failed" else "yellow"
        console.stderr.print(checked.line(), style=style)
    for line in report.intervals():
        console.stderr.print(line)
    for verdict in report.verdicts:
        style = "bold red" if verdict.worse else "green" if verdict.faster else "yellow"
        console.stderr.print(verdict.line(), style=style)


def print_rates(found: FoundRate | Sweep, as_json: bool) -> bool:
    """Print a sweep, or the search for a rate. Return False where no rate holds."""
    need_extra("serve", "optkit bench")
    from optkit.bench.rates import FoundRate
    from optkit.bench.rates_table import LEGEND, problem_lines, rate_table, sweep_table

    for doubt in found.doubts():
        console.warn(f"do not trust this: {doubt}")
    if as_json:
        console.print_json(found.to_dict())
    else:
        print_table(rate_table(found) if isinstance(found, FoundRate) else sweep_table(found))
        for line in LEGEND:
            console.stdout.print(line, style="dim")
    problems = problem_lines(found)
    more = [f"and {len(problems) - MOST_PROBLEMS} further loads"] if len(problems) > MOST_PROBLEMS else []
    for line in [*problems[:MOST_PROBLEMS], *more]:
        console.warn(line)
    if isinstance(found, FoundRate):
        console.stderr.print(found.line(), style="green" if found.highest else "bold red")
        return found.highest is not None
    return True

"""The table of ``optkit bench``: a row a number, a column a side, ratios beside, formulas below."""

from __future__ import annotations

from rich.table import Table

from optkit.bench.metrics import DEFINITIONS
from optkit.bench.result import BenchResult, Key
from optkit.bench.statistics import samples_needed

NAMES = {
    "output_throughput": "output tok/s",
    "request_throughput": "requests/s",
    "goodput": "goodput req/s",
    "slo_attainment": "SLO share",
}
NOT_SHOWN = "not shown"


def rows(result: BenchResult) -> list[tuple[str, Key]]:
    """(label, number) for every line; percentiles beyond the number of requests of every side have none."""
    keys = [k for k in result.numbers() if any(result.shows(side, k) for side in result.sides)]
    return [*((_label(key), key) for key in keys), ("failed", ("failed",))]


def _label(key: Key) -> str:
    return NAMES.get(key[0]) or f"{key[1].upper().replace('_', ' ')} {key[2]} ms"


def table(result: BenchResult) -> Table:
    """A column for each side. All sides but the first have a second column: the ratio of the candidate to the side."""
    first, *others = result.sides
    grid = Table(box=None, pad_edge=False)
    grid.add_column("", no_wrap=True)
    for name in [first, *(text for side in others for text in (side, f"x {side}"))]:
        grid.add_column(name, justify="right")
    for label, path in rows(result):
        cells = [_cell(result.statistic(first, path)) if result.shows(first, path) else NOT_SHOWN]
        for side in others:
            shown = result.shows(first, path) and result.shows(side, path)
            pair = result.statistic(side, path), result.ratio(side, path)
            cells += [_cell(value) if shown else NOT_SHOWN for value in pair]
        grid.add_row(label, *cells)
    return grid


def legend(result: BenchResult) -> list[str]:
    """The meaning of the numbers, a line each."""
    count, (first, *others) = len(result.rounds(result.sides[0])), result.sides
    lines = [
        f"median ±half the interquartile range over {count} interleaved rounds of {result.config.num_prompts} "
        "requests; percentiles interpolate linearly; failed requests are not in latencies and are SLO misses",
    ]
    if not all(result.shows(first, ("latency_ms", "", "p95")) for first in result.sides):
        lines.append(
            f"a p95 is not shown below {samples_needed(95)} requests, a p99 below {samples_needed(99)}"
        )
    if others:
        lines.append(
            f"x {others[0]}: {first} / {others[0]}, taken within each round; latencies: below 1 is faster"
        )
    lines += [f"{name}: {metric.formula}" for name, metric in DEFINITIONS[result.definitions].items()]
    return lines


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    half = (value["q3"] - value["q1"]) / 2
    return _number(value["median"]) + (f" ±{_number(half, 2)}" if half else "")


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.{digits}g}"

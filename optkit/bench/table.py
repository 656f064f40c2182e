"""The table ``optkit bench`` prints: one row a number, one column a side, ratios beside, formulas below."""

from __future__ import annotations

from rich.table import Table

from optkit.bench.metrics import DEFINITIONS
from optkit.bench.run import BenchResult

Row = tuple[str, tuple[str, ...]]


def rows(result: BenchResult) -> list[Row]:
    """(label, path into a round's summary) for every line."""
    lines: list[Row] = []
    for name in DEFINITIONS[result.definitions]:
        label = name.upper().replace("_", " ")
        lines += [(f"{label} p{q} ms", ("latency_ms", name, f"p{q}")) for q in (50, 95, 99)]
    lines += [("output tok/s", ("output_throughput",)), ("requests/s", ("request_throughput",))]
    if result.slo.bounds():
        lines += [("goodput requests/s", ("goodput",)), ("SLO attainment", ("slo_attainment",))]
    return [*lines, ("failed requests", ("failed",))]


def table(result: BenchResult) -> Table:
    """Medians over rounds with quartiles; ``a / b`` is the median within-round ratio."""
    first, *others = result.sides
    columns = [first, *(text for side in others for text in (side, f"{first} / {side}"))]
    grid = Table("", *columns, box=None, pad_edge=False)
    for label, path in rows(result):
        cells = [_cell(result.statistic(first, path))]
        for side in others:
            cells += [_cell(result.statistic(side, path)), _cell(result.ratio(side, path), "x")]
        grid.add_row(label, *cells)
    return grid


def legend(result: BenchResult) -> list[str]:
    """What the numbers mean, one line each."""
    count = len(result.rounds(result.sides[0]))
    lines = [
        f"median [quartiles] over {count} interleaved rounds of {result.config.num_prompts} requests; "
        "percentiles interpolate linearly; failed requests are left out of latencies and are SLO misses",
    ]
    lines += [f"{name}: {metric.formula}" for name, metric in DEFINITIONS[result.definitions].items()]
    return lines


def _cell(value: dict[str, float] | None, unit: str = "") -> str:
    if value is None:
        return "-"
    median, low, high = (_number(value[key]) for key in ("median", "q1", "q3"))
    return f"{median}{unit}" if low == high else f"{median}{unit} [{low}, {high}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"

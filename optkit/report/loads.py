"""Results at several loads: a table of all, and the points of a chart of latency against throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from optkit.bench.result import BenchResult
from optkit.bench.statistics import samples_needed
from optkit.bench.table import NOT_SHOWN
from optkit.pages.numbers import NONE, number
from optkit.report.bench_file import Bench

LOAD_NUMBERS = (
    ("output tokens/s", ("output_throughput",)),
    ("TTFT p50, ms", ("latency_ms", "ttft", "p50")),
    ("TTFT p95, ms", ("latency_ms", "ttft", "p95")),
    ("TPOT p50, ms", ("latency_ms", "tpot", "p50")),
)
TOO_FEW = (
    f"A p95 of fewer than {samples_needed(95)} requests is not shown: "
    "the largest of so few may lie below the true p95."
)


def loads_table(benches: Sequence[Bench]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, a row for each load and side; the last column has claims, as the outcome of a probe."""
    rows = []
    for bench in sorted(benches, key=load_of):
        for side in bench.result.sides:
            cells = [load_cell(bench.result, side, path) for _, path in LOAD_NUMBERS]
            rows.append((bench.name, side, *cells, "; ".join(bench.claims) if side == bench.first else ""))
    return ("load", "side", *(name for name, _ in LOAD_NUMBERS), ""), rows


def hides(rows: Sequence[tuple[str, ...]]) -> bool:
    """Return True if a number in ``rows`` of ``loads_table`` is not shown."""
    return any(NOT_SHOWN in row for row in rows)


def load_cell(result: BenchResult, side: str, path: tuple[str, ...]) -> str:
    """The median over rounds, or ``NOT_SHOWN`` for a percentile of too few requests."""
    value = result.statistic(side, path)
    if value is None:
        return NONE
    return number(value["median"]) if result.shows(side, path) else NOT_SHOWN


def load_of(bench: Bench) -> tuple[float, float]:
    """A key in the order of loads: clients in turn, then rates, then all requests at once."""
    config = bench.result.config
    if config.request_rate is None:
        return (0.0, float(config.max_concurrency)) if config.max_concurrency else (inf, inf)
    return config.request_rate, float(config.max_concurrency or 0)


def load_points(benches: Sequence[Bench], side: str, path: tuple[str, ...]) -> Iterator[tuple[float, float]]:
    """(output tokens/s, latency) of each result that shows the latency of ``side``, lightest load first."""
    for bench in sorted(benches, key=load_of):
        if side in bench.result.sides and bench.result.shows(side, path):
            rate = bench.result.statistic(side, ("output_throughput",))
            latency = bench.result.statistic(side, path)
            if rate and latency:
                yield rate["median"], latency["median"]

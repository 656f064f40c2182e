"""Tables of ``optkit bench --sweep`` and ``--find-rate``: a row for each load."""

from __future__ import annotations

from rich.table import Table

from optkit.bench.comparison import Quantity
from optkit.bench.rates import FoundRate, Sweep
from optkit.bench.result import BenchResult
from optkit.bench.statistics import percentile_bounds, samples_needed
from optkit.bench.table import NOT_SHOWN
from optkit.bench.validity import grows, queue_of

COLUMNS = ("requests/s", "output tok/s", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "E2E p50 ms")
LEGEND = (
    "[low, high]: 95 % bounds of the percentile by order statistics over all requests of the row, each side apart; "
    f"a p95 is not shown below {samples_needed(95)} requests",
    "queue: grows where the slope of the requests in the system is positive at 95 %, so the load is above capacity",
)


def sweep_table(found: Sweep) -> Table:
    """A row for each load and side."""
    grid = Table(box=None, pad_edge=False)
    grid.add_column("load", no_wrap=True)
    bounded = ("goodput req/s",) if found.points[0].result.slo.bounds() else ()
    for name in (*(("side",) if len(found.sides) > 1 else ()), *COLUMNS, *bounded, "queue"):
        grid.add_column(name, justify="right")
    for point in found.points:
        for side in found.sides:
            named = [side] if len(found.sides) > 1 else []
            good = [number(point.result, side, "goodput")] if bounded else []
            grid.add_row(point.label, *named, *cells(point.result, side), *good, queue(point.result, side))
    return grid


def rate_table(found: FoundRate) -> Table:
    """A row for each probe, in the order of the rates."""
    grid = Table(box=None, pad_edge=False)
    for name in ("rate", *COLUMNS, "queue", "promise"):
        grid.add_column(name, justify="right")
    for probe in sorted(found.probes, key=lambda probe: probe.rate):
        row = cells(probe.result, found.side), queue(probe.result, found.side)
        grid.add_row(f"{probe.rate:.3g}/s", *row[0], row[1], "held" if probe.held else "broken")
    return grid


def problem_lines(found: FoundRate | Sweep) -> list[str]:
    """Failed requests and wrong answers, a line for each load and side; failures first."""
    if isinstance(found, FoundRate):
        loads = [(f"{probe.rate:.3g}/s", probe.result) for probe in found.probes]
    else:
        loads = [(point.label, point.result) for point in found.points]
    named = [(f"{label}, {side}", result, side) for label, result in loads for side in result.sides]
    lines = [f"{name}: {text}" for name, result, side in named if (text := failures(result, side))]
    return lines + [f"{name}: {text}" for name, result, side in named if (text := wrong(result, side))]


def failures(result: BenchResult, side: str) -> str:
    """``3 of 60 requests failed, the first: HTTP 500``; empty where all requests were answered."""
    records = result.records(side)
    failed = [record for record in records if not record.ok]
    if not failed:
        return ""
    count = "all" if len(failed) == len(records) else f"{len(failed)} of"
    return f"{count} {len(records)} requests failed, the first: {failed[0].error or 'no token came'}"


def wrong(result: BenchResult, side: str) -> str:
    """The first problem of a side's rounds, such as an answer of another length, with the number of all."""
    lines = [line for turn in result.turns if turn.side == side for line in turn.problems]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def cells(result: BenchResult, side: str) -> list[str]:
    """The numbers of a side at one load."""
    text = [number(result, side, name) for name in ("request_throughput", "output_throughput")]
    latencies = (Quantity("ttft", 50), Quantity("ttft", 95), Quantity("tpot", 50), Quantity("e2e", 50))
    return [*text, *(_percentile(result, side, of) for of in latencies)]


def number(result: BenchResult, side: str, name: str) -> str:
    """The median over rounds of a rate."""
    found = result.statistic(side, (name,))
    return f"{found['median']:.3g}" if found else "-"


def queue(result: BenchResult, side: str) -> str:
    """``grows``, or the average growth in requests over a round."""
    found = [queue_of(turn) for turn in result.turns if turn.side == side]
    if not result.config.open_loop or None in found:
        return "-"
    if any(grows(one) for one in found):
        return "grows"
    return f"{sum(one.growth for one in found if one) / len(found):+.1f}"


def _percentile(result: BenchResult, side: str, of: Quantity) -> str:
    records = result.records(side)
    value, q = of.of(records), of.q or 50.0
    samples = [sample for r in records for sample in of.samples(r)]
    bounds = percentile_bounds(samples, q, sum(not r.ok for r in records))
    if value is None:
        return "-"
    if not result.shows(side, ("latency_ms", of.metric, f"p{q:g}")):
        return NOT_SHOWN
    if bounds.high is None or bounds.low is None:
        return f"{value:.3g}"
    return f"{value:.3g} [{bounds.low:.3g}, {bounds.high:.3g}]"

"""Sections on latency and throughput, from benchmark results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median

from optkit.bench.metrics import OPTKIT
from optkit.bench.records import RequestRecord
from optkit.bench.result import BenchResult
from optkit.bench.table import legend, table
from optkit.pages.charts import Series, xy_chart
from optkit.pages.html import Markup, details, element, items, paragraph, wide_table
from optkit.pages.numbers import number, share
from optkit.pages.page import Card, Section
from optkit.pages.row_charts import Bar, Samples, distribution_chart, stacked_chart
from optkit.pages.svg import grid
from optkit.report.bench_file import Bench
from optkit.report.loads import TOO_FEW, hides, load_points, loads_table
from optkit.report.rich_cells import cells

LATENCIES = (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "Whole request"))
PARTS = ("reading, tokenizing", "queue", "prefill", "between chunks", "network, streaming")
PART_KEYS = ("before_queue", "queue", "prefill", "chunk_wait")
SLOWEST = 10  # at least so many requests show their slowest tenth
SHOWN_PROBLEMS = 20
OVERLOAD = 1.5  # load average before a round, over cores: the sides themselves leave up to 1
BENCH_COMMAND = (
    "optkit bench artifact/ --baseline MODEL --save-result bench.json, then optkit report --bench bench.json"
)


def bench_sections(benches: Sequence[Bench]) -> list[Section]:
    """Latencies by side, throughput against latency, and the parts of the time to first token."""
    styles = side_styles(benches)
    return [
        Section(
            "latency",
            "Latency and throughput",
            [part for bench in benches if not bench.sweep for part in latency_body(bench, styles)],
            f"latency distributions: {BENCH_COMMAND}",
        ),
        Section(
            "throughput",
            "Throughput against latency",
            throughput_body(benches, styles),
            "throughput against latency: several --bench results, as with --request-rate 1, 2 and 4",
        ),
        Section(
            "parts",
            "Parts of the time to first token",
            parts_body(benches),
            f"the parts of the time to first token, of sides served by optkit: {BENCH_COMMAND}",
        ),
    ]


def side_styles(benches: Sequence[Bench]) -> dict[str, int]:
    """A colour and a marker for each side, the same in all charts."""
    sides = dict.fromkeys(side for bench in benches for side in bench.result.sides)
    return {side: i for i, side in enumerate(sides)}


# -- a result -------------------------------------------------------------------------------------------------


def latency_body(bench: Bench, styles: dict[str, int]) -> list[Markup]:
    """A result: the workload, warnings, the table of ``optkit bench``, distributions by side."""
    result = bench.result
    header, rows = cells(table(result))
    charts = [
        distribution_chart(
            title,
            f"{key.upper() if key != 'e2e' else 'end to end'}, ms",
            [Samples(side, samples(result.records(side), key), styles[side]) for side in result.sides],
            "Each dot is a request; the bar spans the quartiles, the ticks are p50 and p95 (or the largest).",
        )
        for key, title in LATENCIES
    ]
    return [
        element("h3", f"{bench.name}: {workload_text(result)}"),
        *warnings(bench),
        *([items(bench.claims)] if bench.claims else []),
        wide_table(header, rows, f"latency and throughput, {bench.name}"),
        grid(charts),
        details("Formulas", items(legend(result), "note")),
    ]


def samples(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """A latency of the finished requests, in milliseconds."""
    return [1e3 * value for record in records if record.ok for value in OPTKIT[metric].samples(record)]


def warnings(bench: Bench) -> list[Markup]:
    """Reasons against the numbers: as stored, and a busy machine at the start of a turn."""
    found = problems(bench)
    if not found:
        return []
    more = [f"and {len(found) - SHOWN_PROBLEMS} more"] if len(found) > SHOWN_PROBLEMS else []
    shown = [*found[:SHOWN_PROBLEMS], *more]
    return [
        paragraph("Disturbed, do not trust these numbers without a second run:", "bad-news"),
        items(shown, "bad-news"),
    ]


def problems(bench: Bench) -> list[str]:
    """The stored problems, and each turn begun on a busy machine."""
    cores = bench.result.environment.get("cores")
    loads = [
        f"{turn.side} round {turn.round}: load average {turn.load_average:.1f} before it, cores: {cores}"
        for turn in bench.result.turns
        if isinstance(cores, int) and turn.load_average > OVERLOAD * cores
    ]
    return [*bench.problems, *loads]


def workload_text(result: BenchResult) -> str:
    """``512 tokens in, 16 out, 1 at a time, 3 rounds of 8 requests``"""
    config = result.config
    rate = f"{number(config.request_rate)} requests/s" if config.request_rate else None
    clients = f"{config.max_concurrency} at a time" if config.max_concurrency else None
    load = ", ".join(filter(None, (rate, clients))) or "all at once"
    rounds = len({turn.round for turn in result.turns})
    plural = "round" if rounds == 1 else "rounds"
    return f"{lengths_text(result)}, {load}, {rounds} {plural} of {config.num_prompts} requests"


def lengths_text(result: BenchResult) -> str:
    """``512 tokens in, 16 out``; of requests with unlike lengths the ranges."""
    records = [record for turn in result.turns for record in turn.records]
    prompts = spread_text([r.prompt_tokens for r in records if r.prompt_tokens] or [result.config.input_len])
    outputs = spread_text([r.tokens for r in records if r.tokens] or [result.config.output_len])
    return f"{prompts} tokens in, {outputs} out"


def spread_text(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def bench_cards(bench: Bench, *, named: bool = False) -> list[Card]:
    """The candidate's medians, with the ratios to the other sides; ``named`` after the file, too."""
    result, first = bench.result, bench.first
    where = f", {bench.name}" if named else ""
    found = []
    for name, path, unit, better in (
        ("TTFT p50", ("latency_ms", "ttft", "p50"), "ms", -1),
        ("TPOT p50", ("latency_ms", "tpot", "p50"), "ms", -1),
        ("output", ("output_throughput",), "tokens/s", 1),
    ):
        if value := result.statistic(first, path):
            ratios = {
                other: ratio["median"] for other in result.sides[1:] if (ratio := result.ratio(other, path))
            }
            note = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in ratios.items())
            better_everywhere = all((ratio - 1) * better > 0 for ratio in ratios.values())
            mood = ("good" if better_everywhere else "worse") if ratios else ""
            found.append(Card(f"{name}, {first}{where}", f"{number(value['median'])} {unit}", note, mood))
    if result.slo.bounds():
        attained = result.statistic(first, ("slo_attainment",))
        missed = result.slo_misses()
        note = "; ".join(missed) or "all bounds held at p95"
        value_text = share(attained["median"] if attained else None)
        found.append(
            Card(f"requests within the SLO{where}", value_text, note, "missed" if missed else "good")
        )
    return found


# -- over results ---------------------------------------------------------------------------------------------


def prompt_series(benches: Sequence[Bench]) -> list[Series]:
    """The median time to first token by prompt length, a series for each side; without prompts from a cache.

    Beside results with a request at a time, results with queues are left out.
    """
    found: dict[str, dict[int, list[float]]] = {}
    styles = side_styles(benches)
    alone = [bench for bench in benches if bench.result.config.max_concurrency == 1]
    for bench in alone or benches:
        for turn in bench.result.turns:
            for record in turn.records:
                tokens = record.prompt_tokens or bench.result.config.input_len
                if record.ok and not record.cached_tokens:
                    found.setdefault(turn.side, {}).setdefault(tokens, []).extend(samples([record], "ttft"))
    return [
        Series(f"{side}, over HTTP", binned(by_tokens), styles[side]) for side, by_tokens in found.items()
    ]


def binned(by_tokens: dict[int, list[float]]) -> list[tuple[float, float]]:
    """(tokens, median) by prompt length; many lengths are put together within 10 % of each other."""
    points: list[tuple[float, float]] = []
    lengths: list[int] = []
    values: list[float] = []
    for tokens in sorted(by_tokens):
        if lengths and tokens > 1.1 * lengths[0]:
            points.append((fmean(lengths), median(values)))
            lengths, values = [], []
        lengths.append(tokens)
        values += by_tokens[tokens]
    return [*points, (fmean(lengths), median(values))] if lengths else points


def throughput_body(benches: Sequence[Bench], styles: dict[str, int]) -> list[Markup]:
    """A point for each load, joined in their order; empty where no two results differ in the load alone."""
    kinds: dict[str, list[Bench]] = {}
    for bench in benches:
        kinds.setdefault(bench.sweep or lengths_text(bench.result), []).append(bench)
    body = []
    for kind, same in kinds.items():
        if len(same) > 1:
            charts = [
                throughput_chart(same, styles, *of)
                for of in (("ttft", "p50"), ("ttft", "p95"), ("tpot", "p50"))
            ]
            header, rows = loads_table(same)
            body += [element("h3", kind), grid(charts), wide_table(header, rows, f"loads, {kind}")]
            body += [paragraph(TOO_FEW, "note")] if hides(rows) else []
            body += [part for bench in same if bench.sweep for part in warnings(bench)]
    return [part for part in body if part]


def throughput_chart(
    benches: Sequence[Bench], styles: dict[str, int], metric: str, percentile: str
) -> Markup:
    series = [
        Series(side, points, style)
        for side, style in styles.items()
        if (points := list(load_points(benches, side, ("latency_ms", metric, percentile))))
    ]
    title = f"{metric.upper()} {percentile}"
    return xy_chart(f"{title} against throughput", "output tokens/s", f"{title}, ms", series)


# -- the parts of the time to first token ---------------------------------------------------------------------


def parts_body(benches: Sequence[Bench]) -> list[Markup]:
    """Mean parts of the time to first token, and of the slowest tenth; empty without a server's times."""
    bars = [bar for bench in benches for bar in part_bars(bench, len(benches) > 1)]
    chart = stacked_chart("Mean time to first token, by part", "ms", PARTS, bars)
    if not chart:
        return []
    note = (
        "The server tells the first four parts with each answer. The last is the rest of the client's time: the way "
        "there and back, and the writing of the first event. A wait for a free client, before a request is sent, is no "
        "part of the time to first token."
    )
    return [grid([chart]), paragraph(note, "note")]


def part_bars(bench: Bench, named: bool) -> Iterator[Bar]:
    for side in bench.result.sides:
        rows = sorted(filter(None, map(ttft_parts, bench.result.records(side))), key=sum)
        if not rows:
            continue
        name = f"{side}, {bench.name}" if named else side
        yield mean_bar(f"{name}, {len(rows)} requests", rows)
        if len(rows) >= SLOWEST:
            slow = rows[-(len(rows) // 10) :]
            yield mean_bar(f"{name}, slowest {len(slow)}", slow)


def mean_bar(name: str, rows: Sequence[tuple[float, ...]]) -> Bar:
    parts = [fmean(part) for part in zip(*rows, strict=True)]
    return Bar(name, parts, f"{number(sum(parts))} ms")


def ttft_parts(record: RequestRecord) -> tuple[float, ...] | None:
    """``PARTS`` of a request in milliseconds; None without a token, or without the server's times."""
    if not record.ok or record.ttft_details is None:
        return None
    (whole,) = samples([record], "ttft")
    told = [1e3 * float(record.ttft_details.get(key) or 0.0) for key in PART_KEYS]
    return *told, max(0.0, whole - sum(told))

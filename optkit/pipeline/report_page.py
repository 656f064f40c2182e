"""The page of a run: ``report.html`` in an artifact, and the first sections of the page of ``optkit report``.

The page is made from the report dict (``report.json`` in the artifact) alone. Every text of the page is escaped, since
model names, skip reasons and options come from files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optkit.evaluation.saved import of_whole
from optkit.pages.charts import Series, xy_chart
from optkit.pages.html import Markup, details, element, paragraph, prose_table, tag, wide_table
from optkit.pages.numbers import number, size_text
from optkit.pages.page import Card, Section, cards, page
from optkit.pages.row_charts import Bar, Pair, pair_chart, stacked_chart
from optkit.pages.svg import grid
from optkit.pipeline import expert_coverage
from optkit.pipeline.explain import disturbed_sentence, misses_sentence, objective_sentence, speed_sentences
from optkit.pipeline.records import PassRecord
from optkit.pipeline.report import (
    COMPILED_HEADER,
    compiled_row,
    evidence_cells,
    overview_row,
    quality_rows,
    sites_text,
    speed_rows,
    target_line,
    weights_text,
    workload_labels,
)
from optkit.pipeline.report_environment import artifact_rows, block
from optkit.pipeline.report_quality import quality_section

NOTE = (
    "Predicted is from the times of single layers, measured on this machine (on a GPU the roofline of the ops); "
    "measured is the ratio of medians over alternating rounds on this "
    "machine. The objective is the recipe's cost of the workload, after over before: below 1 is better. "
    "Quality is against the source model on held-out text, through the same runtime."
)
FLOOR_NOTE = (
    "The grey line is the roofline floor of the artifact: all arithmetic and one read of the weights and the KV, at "
    "the machine's peaks. No kernel can be faster in these number formats."
)
BELOW_FLOOR = (
    "Some times are below the floor, so the peaks of the machine were measured too low, beside other work or on "
    "another machine: optkit doctor measures again."
)


def report_html(report: Mapping[str, Any]) -> str:
    """The report of a run as a self-contained page.

    Args:
        report: ``model``, ``recipe``, ``target`` (a ``Target`` as a dict), ``passes`` and ``whole`` (``PassRecord``
            dicts; ``whole`` is None when nothing was kept), ``alternatives``, records by label, ``floor`` and
            ``memory`` (``report_facts``), and ``evaluation``, the file and hash of the author's evaluation text.
    """
    return page(title_of(report), lead(report), artifact_sections(report))


def title_of(report: Mapping[str, Any]) -> str:
    return f"{report['model']} by {report['recipe']}"


def lead(report: Mapping[str, Any]) -> list[Markup]:
    """The verdict: the numbers of the whole, and the origin of the model."""
    _, whole = records_in(report)
    notes = [paragraph(f"Source: {note}.") for note in report.get("notes", ())]
    if missed := report.get("missed_bounds"):
        notes.append(paragraph(f"The bounds of the recipe are missed: {missed}."))
    return [paragraph(f"Made for {target_line(report['target'])}."), *notes, *cards(whole_cards(whole))]


def artifact_sections(report: Mapping[str, Any]) -> list[Section]:
    """The sections of a run, in order."""
    passes, whole = records_in(report)
    return [
        Section("whole", "The whole, against the source model", whole_body(whole, report["target"])),
        passes_section(report, passes, whole),
        candidates_section(report),
        prompts_section(floor_series(report), step_series(whole)),
        memory_section(report.get("memory", {}), whole),
        quality_section(list(filter(None, [of_whole(str(report["model"]), report["whole"])]))),
        Section("environment", "Environment", block("optkit optimize", artifact_rows(report))),
    ]


def records_in(report: Mapping[str, Any]) -> tuple[list[PassRecord], PassRecord | None]:
    """The passes, and the whole."""
    passes = [PassRecord.from_dict(data) for data in report["passes"]]
    return passes, PassRecord.from_dict(report["whole"]) if report["whole"] else None


# -- the whole ------------------------------------------------------------------------------------------------


def whole_cards(whole: PassRecord | None) -> list[Card]:
    """Speed, size and quality against the source model."""
    if whole is None:
        return []
    found = []
    for label in whole.measured:
        after = 1e3 * whole.measured[label][1]["median"]
        speedup = whole.speedup(label)
        note = f"{number(after)} ms, measured"
        found.append(Card(label, f"{speedup:.2f}x", note, "good" if speedup >= 1 else "worse"))
    if whole.weight_bytes:
        before, after = whole.weight_bytes
        found.append(Card("weights", size_text(after), f"from {size_text(before)}"))
    if whole.quality:
        agreement = whole.quality["top1_agreement"]["value"]
        found.append(
            Card(
                "KL divergence",
                f"{whole.quality['kl_mean']['value']:.2g} nats",
                f"top-1 agreement {agreement:.1%}",
            )
        )
    return found


def whole_body(whole: PassRecord | None, target: Mapping[str, Any]) -> list[Markup]:
    if whole is None:
        return [paragraph("No pass was kept: the artifact is the source model as it is.")]
    return speed_parts(whole, target)


def speed_parts(record: PassRecord, target: Mapping[str, Any]) -> list[Markup]:
    """Speed and size of a record; empty for a pass without sites."""
    parts = [paragraph(f"{line}.") for line in speed_sentences(record, target)]
    if record.objective:
        parts.append(paragraph(f"{objective_sentence(record)}."))
    if record.measured:
        header = ("step", "predicted", "measured", "before ms [quartiles]", "after ms [quartiles]")
        parts.append(wide_table(header, speed_rows(record), f"speed, {record.name}"))
    if record.weight_bytes:
        parts.append(paragraph(f"Weights: {weights_text(record)}."))
    return parts


def quality_parts(record: PassRecord) -> list[Markup]:
    """Quality of a record, by variant; empty where none was measured."""
    parts = []
    for steps, quality in quality_by_variant(record).items():
        where = f", steps of {steps}" if steps else ""
        header = (f"quality against the source model{where}", "value")
        parts.append(wide_table(header, quality_rows(quality), f"quality, {record.name}{where}"))
    return parts


def quality_by_variant(record: PassRecord) -> dict[str, dict[str, Any]]:
    """Reports of quality by variant, under the empty name for a single variant."""
    return record.variants or ({"": record.quality} if record.quality else {})


# -- the passes -----------------------------------------------------------------------------------------------


def passes_section(
    report: Mapping[str, Any], passes: Sequence[PassRecord], whole: PassRecord | None
) -> Section:
    """The work of each pass, predicted and measured; then each pass in full."""
    measured = [*passes, *([whole] if whole else [])]
    disturbed = disturbed_sentence(measured)
    body = [
        prose_table(("pass", "decision", "reason", "sites", "weights"), map(overview, passes)),
        grid([predictions_chart(measured), divergence_chart(passes)]),
        paragraph(NOTE, "note"),
        *text_note(report.get("evaluation")),
        paragraph(f"Predictions: {misses_sentence(measured) or 'none to compare'}.", "note"),
    ]
    if disturbed:
        body.append(paragraph(f"{disturbed[0].upper()}{disturbed[1:]}.", "bad-news"))
    body += [pass_details(record, report["target"]) for record in passes]
    return Section("passes", "Passes", [part for part in body if part])


def overview(record: PassRecord) -> tuple[str, ...]:
    """A row of the table of passes, the decision in its colour."""
    name, decision, *others = overview_row(record)
    return name, element("span", decision, css_class(record)), *others


def css_class(record: PassRecord) -> str:
    return record.decision.replace(" ", "-")


def text_note(text: Mapping[str, str] | None) -> list[Markup]:
    """The paragraph on an evaluation text of the recipe's author; none for the shipped text."""
    if text is None:
        return []
    return [paragraph(f"The held-out text is {text['text']}, sha256 {text['sha256']}.", "note")]


def predictions_chart(records: Sequence[PassRecord]) -> Markup:
    """Predicted and measured speedups of each pass and of the whole."""
    pairs = [
        Pair(
            f"{record.name}, {label}",
            record.predicted_speedup(label) if label in record.predicted else None,
            record.speedup(label),
        )
        for record in records
        for label in record.measured
    ]
    names = ("predicted", "measured")
    return pair_chart(
        "Predicted against measured", "speedup, times", names, pairs, mark=1.0, note="Right of 1 is faster."
    )


def divergence_chart(records: Sequence[PassRecord]) -> Markup:
    """KL divergence from the source model after each pass; the pass itself, or all before it, may have caused it."""
    bars = [
        Bar(record.name, [value], f"{value:.2g}")
        for record in records
        if record.quality and (value := record.quality["kl_mean"]["value"]) == value
    ]
    note = "Passes add up: each is measured with those before."
    return stacked_chart(
        "Distance from the source model", "mean KL divergence, nats", ["KL"], bars, note=note
    )


def pass_details(record: PassRecord, target: Mapping[str, Any]) -> Markup:
    """A pass in full: decision, options, sites, skips, speed, quality."""
    options = ", ".join(f"{key}={value}" for key, value in record.config.items())
    parts = [
        element("p", f"{record.decision}: {record.reason}", css_class(record)),
        paragraph(f"{sites_text(record)}." + (f" Options: {options}." if options else "")),
    ]
    if record.fallback:
        parts.append(paragraph(f"Back in float, the most sensitive first: {', '.join(record.fallback)}."))
    if record.skips:
        rows = [(skip["reason"], str(skip["count"]), skip["first"]) for skip in record.skips]
        header = ("left alone because", "places", "first")
        parts.append(prose_table(header, rows))
    if tried := record.stats.get("compiled"):
        parts.append(wide_table(COMPILED_HEADER, map(compiled_row, tried), "compiled variants"))
    if experts := list(expert_coverage.rows(record.stats)):
        parts.append(wide_table(expert_coverage.HEADER, experts, "calibration of experts"))
    opened = details(
        f"{record.name}: {record.decision}", *parts, *speed_parts(record, target), *quality_parts(record)
    )
    return tag("div", opened, class_="pass")


def candidates_section(report: Mapping[str, Any]) -> Section:
    """All candidates for each place of the pipeline, those not taken included."""
    body: list[Markup] = []
    for label, given in report.get("alternatives", {}).items():
        records = [PassRecord.from_dict(data) for data in given]
        labels = workload_labels(records)
        header = ("candidate", "decision", "reason", *labels, "KL, nats", "top-1", "weights")
        rows = [(r.name, r.decision, r.reason, *evidence_cells(r, labels)) for r in records]
        body += [element("h3", f"Candidates: {label}"), prose_table(header, rows)]
    return Section("candidates", "Candidates", body)


# -- time by prompt length ------------------------------------------------------------------------------------


def floor_series(report: Mapping[str, Any]) -> Series | None:
    """The least time of a prompt by itself, in milliseconds; None in reports of earlier versions."""
    points = [(float(tokens), 1e3 * seconds) for tokens, seconds in report.get("floor", ())]
    return Series("roofline floor", points, None) if points else None


def step_series(whole: PassRecord | None) -> list[Series]:
    """The prefill steps measured by ``optkit optimize``, in milliseconds by tokens."""
    sides: tuple[list[tuple[float, float]], ...] = ([], [])
    for label, timings in (whole.measured if whole else {}).items():
        kind, _, tokens = label.partition(" ")
        if kind == "prefill" and tokens.isdigit():
            for points, timing in zip(sides, timings, strict=True):
                points.append((float(tokens), 1e3 * timing["median"]))
    names = (("source model, one step", 7), ("artifact, one step", 6))
    return [Series(name, points, style) for (name, style), points in zip(names, sides, strict=True) if points]


def prompts_section(floor: Series | None, series: Sequence[Series]) -> Section:
    """Time to first token against prompt length, with the floor up to twice the longest prompt."""
    chart = prompts_chart(floor, series)
    if not chart or floor is None:
        return Section("prompts", "Time by prompt length", [grid([chart])] if chart else [])
    notes = [paragraph(FLOOR_NOTE, "note")]
    if any(y < floor_at(floor, x) for one in series for x, y in one.points):
        notes.append(paragraph(BELOW_FLOOR, "bad-news"))
    return Section("prompts", "Time by prompt length", [grid([chart, share_chart(floor, series)]), *notes])


def share_chart(floor: Series, series: Sequence[Series]) -> Markup:
    """The floor over each time, in percent: 100 % is all that the machine can do."""
    shares = [
        Series(one.name, [(x, 100 * floor_at(floor, x) / y) for x, y in one.points if y > 0], one.style)
        for one in series
    ]
    title, label = "Share of the roofline reached", "floor over time, %"
    return xy_chart(
        title, "prompt, tokens", label, shares, log_x=True, log_y=False, note="100 % is the floor."
    )


def prompts_chart(floor: Series | None, series: Sequence[Series]) -> Markup:
    longest = max((x for one in series for x, _ in one.points), default=0.0)
    if not longest:
        return Markup("")
    kept = (
        [] if floor is None else [Series(floor.name, [p for p in floor.points if p[0] <= 2 * longest], None)]
    )
    title = "Time to first token against prompt length"
    return xy_chart(title, "prompt, tokens", "TTFT, ms", [*kept, *series], log_x=True, log_y=True)


def floor_at(floor: Series, tokens: float) -> float:
    """The floor for a prompt, between the lengths that have one on a straight line."""
    import numpy as np

    lengths, times = zip(*floor.points, strict=True)
    return float(np.interp(tokens, lengths, times))


# -- memory ---------------------------------------------------------------------------------------------------


def memory_section(memory: Mapping[str, Any], whole: PassRecord | None) -> Section:
    """The plan of a server's memory: weights, KV pool, the largest step."""
    if memory and whole and whole.weight_bytes:
        memory = {**memory, "weight_bytes": whole.weight_bytes[1]}
    rows = list(memory_rows(memory, whole))
    parts = [float(memory.get(key) or 0) / 1e6 for key in ("weight_bytes", "pool_bytes", "activation_bytes")]
    bars = [Bar("server", parts, size_text(1e6 * sum(parts)))]
    names = ("weights", "KV and states", "largest step")
    chart = stacked_chart("Memory plan", "MB", names, bars, note="Without the processes themselves.")
    body = [grid([chart]), wide_table(("memory", "value"), rows, "memory plan")] if rows else []
    return Section("memory", "Memory", [part for part in body if part])


def memory_rows(memory: Mapping[str, Any], whole: PassRecord | None) -> Iterator[tuple[str, str]]:
    """The plan in rows; empty for a report of an earlier version."""
    if not memory:
        return
    yield "weights", size_text(memory["weight_bytes"])
    if memory["token_bytes"]:
        before = whole.kv_token_bytes[0] if whole and whole.kv_token_bytes else memory["token_bytes"]
        change = f", {before:,} in the source model" if before != memory["token_bytes"] else ""
        yield "KV of a token", f"{memory['token_bytes']:,} bytes{change}"
        full = memory["token_bytes"] * memory["max_model_len"] + memory["sequence_bytes"]
        yield f"states of a request of {memory['max_model_len']:,} tokens", size_text(full)
    if memory["sequence_bytes"]:
        yield "recurrent states of a request", size_text(memory["sequence_bytes"])
    if memory.get("pool_bytes"):
        yield "KV cache (kv_cache_bytes)", size_text(memory["pool_bytes"])
    if memory.get("kv_tokens"):
        yield "tokens that the KV cache holds", f"{memory['kv_tokens']:,}"
    if memory.get("refusal"):
        yield "KV cache", memory["refusal"]
    step = f"activations of a step of {memory['step_tokens']:,} tokens, at most"
    yield step, size_text(memory["activation_bytes"])

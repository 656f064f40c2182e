"""A run in words and tables: the cells shared by the terminal and the page, and the table of ``optkit optimize``.

Numbers are shown as measured; a prediction stands next to each measurement, so a wrong cost model is visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

from rich.table import Table
from rich.text import Text

from optkit.pipeline.decision import LONG, long_text
from optkit.pipeline.explain import (
    disturbed_sentence,
    explain,
    misses_sentence,
    objective_sentence,
)
from optkit.pipeline.records import PassRecord, RunRecord

# -- a record in words -----------------------------------------------------------------------------------


COMPILED_HEADER = ("tokens a step", "compiled ms", "uncompiled ms", "runs", "because")


def compiled_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table of compiled variants: both times, and the code in use."""
    keys = ("compiled_seconds", "uncompiled_seconds")
    times = (f"{row[key] * 1e3:.3f}" if key in row else "-" for key in keys)
    return row["tokens"], *times, "compiled" if row["kept"] else "uncompiled", row["reason"] or "faster"


def overview_row(record: PassRecord) -> tuple[str, ...]:
    return record.name, record.decision, record.reason, str(record.changed), weights_text(record)


def sites_text(record: PassRecord) -> str:
    return f"{record.changed} of {len(record.sites)} sites changed" if record.sites else "No site found"


def target_line(target: Mapping[str, Any]) -> str:
    """``cpu, 2 cores: 210 GFLOP/s float32, 890 Gop/s int8, 18.2 GB/s (measured)``."""
    rates = (("fp32_flops", "GFLOP/s float32"), ("int8_ops", "Gop/s int8"), ("memory_bandwidth", "GB/s"))
    shown = [f"{target[key] / 1e9:.3g} {unit}" for key, unit in rates if target.get(key)]
    return f"{target['name']}, {target['cores']} cores: {', '.join(shown)} ({target['source']})"


def predictions_line(records: Sequence[PassRecord]) -> str:
    """The sentence about predictions; says so where nothing has both a prediction and a measurement."""
    return f"Predictions: {misses_sentence(records) or 'none to compare'}."


def weights_text(record: PassRecord) -> str:
    if not record.weight_bytes:
        return "-"
    before, after = (f"{size / 1e6:.1f}" for size in record.weight_bytes)
    return f"{before} MB" if before == after else f"{before} to {after} MB"


def speed_rows(record: PassRecord) -> Iterator[tuple[str, ...]]:
    for label, timings in record.measured.items():
        predicted = f"{record.predicted_speedup(label):.2f}x" if label in record.predicted else "none"
        yield label, predicted, f"{record.speedup(label):.2f}x", *map(timing_text, timings)


def timing_text(timing: Mapping[str, float]) -> str:
    """Milliseconds, from seconds."""
    median, q1, q3 = (timing[key] * 1e3 for key in ("median", "q1", "q3"))
    digits = 0 if median >= 1000 else 1 if median >= 10 else 3
    return f"{median:.{digits}f} [{q1:.{digits}f}, {q3:.{digits}f}]"


def quality_rows(quality: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of divergences in nats, with the standard error over windows."""

    def estimate(key: str, spec: str) -> str:
        return f"{quality[key]['value']:{spec}} ± {quality[key]['stderr']:.2g}"

    ratio = quality["ln_ppl_ratio"]
    long = quality.get(LONG)
    return [
        ("mean KL divergence, nats", estimate("kl_mean", ".3g")),
        ("99th percentile KL, nats", f"{quality['kl_p99']:.3g}"),
        ("top-1 agreement", estimate("top1_agreement", ".4f")),
        (
            "perplexity, over the source's",
            f"{exp(ratio['value']):.4f} ± {exp(ratio['value']) * ratio['stderr']:.2g}",
        ),
        (
            "perplexity, source and here",
            f"{quality['reference_ppl']['value']:.2f} and {quality['ppl']['value']:.2f}",
        ),
        ("scored positions", positions_text(quality)),
        *([("loss on long documents, nats a token [95 %]", long_text(long))] if long else []),
    ]


def positions_text(quality: Mapping[str, Any]) -> str:
    """``8176 in 16 windows of 40``: the quality was certain before the end of the text."""
    text = f"{quality['tokens']} in {quality['windows']} windows"
    planned = quality.get("planned_windows")
    return f"{text} of {planned}" if planned else text


# -- the terminal ----------------------------------------------------------------------------------------

COLORS = {"chosen": "green", "kept": "green", "reduced": "yellow", "rolled back": "red", "skipped": "dim"}


def run_table(run: RunRecord) -> Table:
    """A row a pass and a row for the whole: decision, sites, speedups (measured, predicted), quality."""
    labels = workload_labels(records_of(run))
    table = record_table("pass", labels, "sites")
    for record in records_of(run):
        middle = ["", ""] if record is run.whole else [decision_text(record), str(record.changed)]
        table.add_row(Text(record.name), *middle, *evidence_cells(record, labels))
    if labels:
        table.caption = "speedups: measured (predicted, where there is a prediction)"
        variants = next((list(record.variants) for record in records_of(run) if len(record.variants) > 1), [])
        if variants:
            table.caption += f"; quality: in steps of {' / of '.join(variants)}"
    return table


def alternatives_table(label: str, records: Sequence[PassRecord]) -> Table:
    """A row for each candidate of the recipe's entry ``label``, the best predicted first."""
    labels = workload_labels(records)
    table = record_table(f"{label}: candidates", labels)
    for record in records:
        table.add_row(Text(record.name), decision_text(record), *evidence_cells(record, labels))
    return table


def record_table(first: str, labels: Sequence[str], *more: str) -> Table:
    """An empty table with a column for each number of ``evidence_cells``."""
    return Table(first, "decision", *more, *labels, "KL, nats", "top-1", "weights", box=None, pad_edge=False)


def decision_text(record: PassRecord) -> Text:
    return Text(record.decision, style=COLORS.get(record.decision, ""))


def evidence_cells(record: PassRecord, labels: Sequence[str]) -> list[str]:
    """Speedup at each workload point, quality and size."""
    speeds = [speed_cell(record, label) for label in labels]
    return [*speeds, *quality_cells(record), size_cell(record)]


def compiled_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of compiled variants, their times and the code in use; empty without rows."""
    table = Table(*COMPILED_HEADER, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, compiled_row(row)))
    return table


def compiled_variants(run: RunRecord) -> list[dict[str, Any]]:
    """The variants of compiled code tried in a run."""
    return [row for record in run.passes for row in record.stats.get("compiled", ())]


def records_of(run: RunRecord) -> list[PassRecord]:
    return [*run.passes, *([run.whole] if run.whole else [])]


def workload_labels(records: Sequence[PassRecord]) -> list[str]:
    """Every workload point of ``records``, in the recipe's order."""
    return list(dict.fromkeys(label for record in records for label in record.measured))


def size_cell(record: PassRecord) -> str:
    return f"{record.weight_bytes[1] / 1e6:.0f} MB" if record.weight_bytes else "-"


def speed_cell(record: PassRecord, label: str) -> str:
    if label not in record.measured:
        return f"({record.predicted_speedup(label):.2f})" if label in record.predicted else "-"
    predicted = f" ({record.predicted_speedup(label):.2f})" if label in record.predicted else ""
    return f"{record.speedup(label):.2f}x{predicted}"


def quality_cells(record: PassRecord) -> tuple[str, str]:
    """KL and top-1; by variant where layers have several, few tokens first."""
    if not record.quality:
        return "-", "-"
    reports = list(record.variants.values()) or [record.quality]
    divergence = " / ".join(f"{quality['kl_mean']['value']:.2g}" for quality in reports)
    return divergence, " / ".join(f"{quality['top1_agreement']['value']:.1%}" for quality in reports)


def summary_lines(run: RunRecord, target: Mapping[str, Any] | None = None) -> list[str]:
    """The result in a few sentences: the source, the gain of the whole, the reason for each decision."""
    lines = [f"source: {note}" for note in run.notes]
    if run.whole is None:
        lines.append("no pass was kept: the artifact is the source model as it is")
    elif run.whole.measured:
        speeds = ", ".join(f"{label} {run.whole.speedup(label):.2f}x" for label in run.whole.measured)
        lines.append(f"against the source model, measured: {speeds}; weights {weights_text(run.whole)}")
        if run.whole.objective:
            lines.append(objective_sentence(run.whole))
    if run.missed_bounds:
        lines.append(f"the bounds of the recipe are missed: {run.missed_bounds}")
    lines += [f"{record.name} {explain(record, target or {})}" for record in run.passes]
    for label, candidates in run.alternatives.items():
        lines += [f"{label}, {record.name} {record.decision}: {record.reason}" for record in candidates]
    records = records_of(run)
    return lines + [line for line in (misses_sentence(records), disturbed_sentence(records)) if line]

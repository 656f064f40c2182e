"""The report as Markdown for a pull request: the verdict, then short tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from optkit.bench.table import table
from optkit.pages.html import Markup
from optkit.pages.page import trouble
from optkit.pipeline.explain import disturbed_sentence
from optkit.pipeline.report import evidence_cells, workload_labels
from optkit.pipeline.report_page import records_in
from optkit.pipeline.report_quality import quality_table
from optkit.report.bench_sections import problems, workload_text
from optkit.report.document import Sources
from optkit.report.loads import TOO_FEW, hides, loads_table
from optkit.report.result_sections import (
    OP_HEADER,
    STEP_HEADER,
    plan_lines,
    plan_rows,
    profile_rows,
    tuning_line,
)
from optkit.report.rich_cells import cells

TAG = re.compile(r"<[^>]*>")
SPECIAL = re.compile(r"[\\`*_{}\[\]|~$]")
AT_START = ("#", "+", "-")  # of headings and lists
ENTITIES = (
    ("&", "&amp;"),
    ("<", "&lt;"),
    (">", "&gt;"),
    ("@", "&#64;"),
    ("://", "&#58;//"),
    ("www.", "www&#46;"),
)
MOST_PROBLEMS = 5
MOST_OPS = 5  # rows of a phase of a profile


def report_markdown(sources: Sources) -> str:
    """The report in GitHub's Markdown; texts from files are escaped."""
    blocks = [f"### {escaped(sources.title)}", *verdict(sources), *artifact_blocks(sources)]
    for tuning in sources.tunings:
        blocks.append(f"**{escaped(tuning.objective)}**: {escaped(tuning_line(tuning))}")
        blocks.append("\n".join(f"- {escaped(line)}" for line in (*tuning.reasons, *tuning.advice)))
    for bench in (bench for bench in sources.benches if not bench.sweep):
        header, rows = cells(table(bench.result))
        title = f"**{escaped(bench.name)}**: {escaped(workload_text(bench.result))}"
        blocks += [title, markdown_table(header, rows)]
    for name in dict.fromkeys(bench.sweep for bench in sources.benches if bench.sweep):
        loads = [bench for bench in sources.benches if bench.sweep == name]
        columns, lines = loads_table(loads)
        blocks += [f"**{escaped(name)}**", markdown_table(columns, lines)]
        blocks += [TOO_FEW] if hides(lines) else []
    for profile in sources.profiles:
        for phase in profile.phases.values():
            blocks.append(f"**{escaped(profile.artifact)}, {escaped(phase.label)}**")
            blocks.append(markdown_table(OP_HEADER, profile_rows(phase, MOST_OPS)))
    for plan in sources.plans:
        blocks.append(
            f"**{escaped(plan.recipe)} on {escaped(plan.model)}, {escaped(plan.machine.title)}**, predicted"
        )
        blocks.append(markdown_table(STEP_HEADER, plan_rows(plan)))
        blocks.append("\n".join(f"- {escaped(line)}" for line in plan_lines(plan)))
    for evaluation in sources.qualities:
        header = ["quality", *(name or "value" for name in evaluation.variants)]
        blocks += [f"**{escaped(evaluation.title)}**", markdown_table(header, quality_table(evaluation))]
    return "\n\n".join(filter(None, blocks)) + "\n"


def verdict(sources: Sources) -> Iterator[str]:
    """The cards of the page as a list, and the warnings."""
    lines = []
    for card in sources.cards():
        note = f" ({escaped(card.note)})" if card.note else ""
        mark = f" **{trouble(card)}**" if trouble(card) else ""
        lines.append(f"- {escaped(card.name)}: **{escaped(card.value)}**{note}{mark}")
    yield "\n".join(lines)
    for bench in sources.benches:
        if bench.claims and not bench.sweep:
            yield "\n".join(f"- {escaped(bench.name)}: {escaped(line)}" for line in bench.claims)
        found = problems(bench)
        if found:
            more = f" and {len(found) - MOST_PROBLEMS} more" if len(found) > MOST_PROBLEMS else ""
            listed = "; ".join(map(escaped, found[:MOST_PROBLEMS]))
            yield f"> **Disturbed**, {escaped(bench.name)}: {listed}{more}"
    if sources.report is not None:
        passes, whole = records_in(sources.report)
        if line := disturbed_sentence([*passes, *([whole] if whole else [])]):
            yield f"> **Disturbed**: {escaped(line)}"


def artifact_blocks(sources: Sources) -> Iterator[str]:
    """The table of passes, with the whole as the last row."""
    if sources.report is None:
        return
    passes, whole = records_in(sources.report)
    records = [*passes, *([whole] if whole else [])]
    labels = workload_labels(records)
    header = ("pass", "decision", "sites", *labels, "KL, nats", "top-1", "weights")
    rows = [
        (r.name, *(("", "") if r is whole else (r.decision, str(r.changed))), *evidence_cells(r, labels))
        for r in records
    ]
    yield markdown_table(header, rows)
    if labels:
        yield "Speedups: measured (predicted)."


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in GitHub's form; numbers stand at the right."""
    lines = [line_of(header), "|" + "|".join(["---", *["---:"] * (len(header) - 1)]) + "|"]
    return "\n".join([*lines, *map(line_of, rows)])


def line_of(row: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, row)) + " |"


def escaped(text: str) -> str:
    """``text`` on a line, without Markdown, HTML, links and mentions."""
    plain = " ".join((TAG.sub("", text) if isinstance(text, Markup) else text).split())
    for found, written in ENTITIES:
        plain = plain.replace(found, written)
    marked = SPECIAL.sub(r"\\\g<0>", plain)
    return f"\\{marked}" if marked.startswith(AT_START) else marked

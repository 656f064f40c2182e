"""The whole report: the verdict first, then the sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.evaluation.saved import Evaluation, of_whole
from optkit.pages.html import Markup, paragraph
from optkit.pages.page import Card, Section, cards, page
from optkit.pipeline.report import target_line
from optkit.pipeline.report_page import (
    candidates_section,
    floor_series,
    memory_section,
    passes_section,
    prompts_section,
    records_in,
    step_series,
    title_of,
    whole_body,
    whole_cards,
)
from optkit.pipeline.report_quality import greedy_missing, quality_section
from optkit.report.bench_file import Bench
from optkit.report.bench_sections import bench_cards, bench_sections, problems, prompt_series
from optkit.report.environment_section import environment_section
from optkit.report.result_sections import result_sections
from optkit.report.saved_results import SavedPlan, SavedProfile, SavedTuning

OPTIMIZE_COMMAND = "optkit optimize MODEL -o artifact/, then optkit report artifact/"


@dataclass(frozen=True)
class Sources:
    """The content of a report.

    Attributes:
        report: report.json of an artifact (``artifact_report``), or None.
    """

    report: Mapping[str, Any] | None = None
    benches: Sequence[Bench] = ()
    evaluations: Sequence[Evaluation] = ()
    plans: Sequence[SavedPlan] = ()
    profiles: Sequence[SavedProfile] = ()
    tunings: Sequence[SavedTuning] = ()

    @property
    def title(self) -> str:
        if self.report is not None:
            return title_of(self.report)
        names = [
            *(bench.sweep or bench.name for bench in self.benches),
            *(one.title for one in self.evaluations),
            *(one.objective for one in self.tunings),
            *(f"{one.recipe} on {one.model}" for one in self.plans),
            *(one.artifact for one in self.profiles),
        ]
        return ", ".join(dict.fromkeys(names))

    @property
    def qualities(self) -> list[Evaluation]:
        """The evaluations, or without any the quality measured by ``optkit optimize``."""
        if self.evaluations or self.report is None:
            return list(self.evaluations)
        found = of_whole(str(self.report["model"]), self.report["whole"])
        return [] if found is None else [found]

    def cards(self) -> list[Card]:
        """The numbers at the top: of the artifact, and of each benchmark."""
        whole = None if self.report is None else records_in(self.report)[1]
        single = [bench for bench in self.benches if not bench.sweep]
        found = [card for bench in single for card in bench_cards(bench, named=len(single) > 1)]
        return [*whole_cards(whole), *found]


def report_page(sources: Sources) -> str:
    """The report as a self-contained page."""
    report = sources.report
    lead: list[Markup] = []
    if report is not None:
        lead.append(paragraph(f"Made for {target_line(report['target'])}."))
        lead += [paragraph(f"Source: {note}.") for note in report.get("notes", ())]
    lead += cards(sources.cards())
    if any(map(problems, sources.benches)):
        lead.append(
            paragraph("Some measurements were disturbed; each is named beside its numbers.", "bad-news")
        )
    return page(sources.title, lead, sections(sources))


def sections(sources: Sources) -> list[Section]:
    """All sections in order; a section without data has the command for the data."""
    report, benches = sources.report, sources.benches
    latency, throughput, parts = bench_sections(benches)
    before, after = artifact_parts(report)
    whole = None if report is None else records_in(report)[1]
    floor = None if report is None else floor_series(report)
    prompts = prompts_section(floor, [*step_series(whole), *prompt_series(benches)])
    quality = [quality_section(sources.qualities), greedy_missing(sources.qualities)]
    environment = environment_section(report, benches, sources.evaluations)
    tune, plan, profile = result_sections(sources.plans, sources.profiles, sources.tunings)
    measured = [latency, prompts, throughput, parts, profile]
    return [tune, *before, *measured, plan, *after, *quality, environment]


def artifact_parts(report: Mapping[str, Any] | None) -> tuple[list[Section], list[Section]]:
    """The sections of an artifact before and after the sections of benchmarks."""
    if report is None:
        missing = f"the passes, the roofline floor and the memory plan: {OPTIMIZE_COMMAND}"
        return [Section("passes", "Passes", (), missing)], []
    passes, whole = records_in(report)
    first = Section("whole", "The whole, against the source model", whole_body(whole, report["target"]))
    memory = memory_section(report.get("memory") or {}, whole)
    return [first, passes_section(report, passes, whole), candidates_section(report)], [memory]

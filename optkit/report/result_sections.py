"""Sections on saved plans, profiles and tunings."""

from __future__ import annotations

from collections.abc import Sequence

from optkit.pages.html import Markup, details, element, items, paragraph, wide_table
from optkit.pages.numbers import milliseconds, number, share, size_text
from optkit.pages.page import Section
from optkit.pipeline.report_environment import block
from optkit.report.environment_section import environment_rows
from optkit.report.saved_results import ProfiledPhase, SavedPlan, SavedProfile, SavedTuning

MOST_ROWS = 15  # of a profile's phase, and of open tables of runs
STEP_HEADER = ("step", "sequences", "predicted", "roofline", "bound by")
OP_HEADER = ("where", "op", "layers", "time", "of step", "of roof", "lost", "bound")
RUN_HEADER = ("run", "requests", "measured", "seconds")


def result_sections(
    plans: Sequence[SavedPlan], profiles: Sequence[SavedProfile], tunings: Sequence[SavedTuning]
) -> list[Section]:
    """The sections; an empty one has the command with the content."""
    return [
        Section(
            "tune",
            "Tuning",
            [part for one in tunings for part in tuning_body(one)],
            told("--tune", SavedTuning),
        ),
        Section(
            "plan", "Plan", [part for one in plans for part in plan_body(one)], told("--plan", SavedPlan)
        ),
        Section(
            "profile",
            "Profile",
            [part for one in profiles for part in profile_body(one)],
            told("--profile", SavedProfile),
        ),
    ]


def told(option: str, kind: type[SavedPlan | SavedProfile | SavedTuning]) -> str:
    name = option.removeprefix("--")
    return f"a {name} ({option}): {kind.COMMAND}"


# -- plan -----------------------------------------------------------------------------------------------------


def plan_body(found: SavedPlan) -> list[Markup]:
    """The steps with their roofline, memory, replicas and the passes with the highest gains."""
    return [
        element("h3", f"{found.recipe} on {found.model}, {found.machine.title}"),
        paragraph(f"Predicted, not measured: {found.prediction}.", "note"),
        wide_table(STEP_HEADER, plan_rows(found), f"predicted steps, {found.recipe}"),
        items(plan_lines(found)),
    ]


def plan_rows(found: SavedPlan) -> list[tuple[str, ...]]:
    return [
        (
            row.step,
            str(row.sequences),
            milliseconds(row.seconds),
            milliseconds(row.floor_seconds),
            row.bound_by,
        )
        for row in found.steps
    ]


def plan_lines(found: SavedPlan) -> list[str]:
    """Memory, replicas, gains and notes, a sentence each."""
    memory = found.memory
    lines = [
        f"Memory: weights {size_text(memory.weights)}, largest step {size_text(memory.activations)}, KV cache "
        f"{size_text(memory.kv_cache)} of {size_text(memory.most_kv)}."
    ]
    if not memory.fits:
        lines.append("The model does NOT FIT this machine with this recipe.")
    if (need := found.replicas) is not None:
        load = f"{need.slo} at {number(need.requests_per_second)} requests/s"
        if need.each is None:
            lines.append(f"Replicas: none hold {load}: {need.cause}.")
        else:
            p50, p95, _ = need.each.ttft
            lines.append(
                f"Replicas: {need.replicas} for {load}, each {share(need.each.utilization)} used, TTFT p50 "
                f"{milliseconds(p50)} and p95 {milliseconds(p95)}, TPOT {milliseconds(need.each.tpot)}."
            )
    for name, gains in (("Passes of the recipe", found.passes), ("Passes left out", found.left_out)):
        best = sorted(gains, key=lambda gain: -gain.objective)[:3]
        if best:
            lines.append(f"{name}: {', '.join(f'{one.name} {one.objective:.2f}x' for one in best)}.")
    return [*lines, *found.notes]


# -- profile --------------------------------------------------------------------------------------------------


def profile_body(found: SavedProfile) -> list[Markup]:
    """The ops of each phase with the most lost time."""
    parts = []
    for phase in found.phases.values():
        parts += [
            element("h3", f"{found.artifact}: {phase.label}"),
            paragraph(phase_line(phase, found.threads)),
            wide_table(OP_HEADER, profile_rows(phase), f"ops by lost time, {phase.label}"),
        ]
    return parts


def phase_line(phase: ProfiledPhase, threads: int) -> str:
    part = share(phase.roof / phase.seconds if phase.seconds else None)
    return (
        f"{milliseconds(phase.seconds)} with {threads} threads; the roof is {milliseconds(phase.roof)} ({part}); "
        f"{share(phase.accounted)} of the step has a name. Most lost time first."
    )


def profile_rows(phase: ProfiledPhase, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
    """The rows with the most lost time, and the rest as one."""
    ordered = sorted(phase.rows, key=lambda row: -row.lost)
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            row.op,
            str(row.count) if row.op else "",
            milliseconds(row.seconds),
            share(row.seconds / phase.seconds if phase.seconds else None),
            share(row.share_of_roof) if row.roof else "",
            milliseconds(row.lost),
            row.bound,
        )
        for row in ordered[:most]
    ]
    if rest := ordered[most:]:
        seconds, lost = sum(row.seconds for row in rest), sum(row.lost for row in rest)
        of_step = share(seconds / phase.seconds if phase.seconds else None)
        rows.append((f"{len(rest)} more", "", "", milliseconds(seconds), of_step, "", milliseconds(lost), ""))
    return rows


# -- tune -----------------------------------------------------------------------------------------------------


def tuning_body(found: SavedTuning) -> list[Markup]:
    """The verdict with its reasons, what would help, and every measured run."""
    shape = found.shape
    runs = wide_table(RUN_HEADER, found.measured, f"measured runs, {found.objective}")
    return [
        element(
            "h3", f"{found.objective}: {shape.input_len} tokens in, {shape.output_len} out, {shape.load}"
        ),
        paragraph(tuning_line(found), "" if found.held else "bad-news"),
        items([*found.reasons, *found.advice, *found.notes]),
        *([details(f"All {len(found.measured)} measured runs", runs)] if found.measured else []),
        *block("optkit tune", environment_rows(found.conditions)),
    ]


def tuning_line(found: SavedTuning) -> str:
    """The verdict in a sentence."""
    if not found.chosen:
        return "Not shown: no candidate was served."
    verdict = "Held" if found.held else "Not shown"
    return f"{verdict} by {found.chosen}. The worst order of the confirmation: {found.claim or 'none'}."

"""The page of a profile: a timeline and a table for each phase, in a single HTML file without requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from optkit.profiling.formats import name_of, thread_name
from optkit.profiling.report import PhaseReport, Report
from optkit.profiling.table import COLUMNS, cells, machine, summary
from optkit.profiling.timeline import Slice, Timeline

MARK = "DATA"  # in the page, in the place of the data


def page(report: Report, chosen: Sequence[Timeline]) -> str:
    """The page.

    Args:
        chosen: the timeline of each phase.
    """
    frames: dict[str, int] = {}
    data = {
        "title": f"Profile of {report.name}",
        "machine": machine(report),
        "columns": COLUMNS,
        "phases": [_phase(report, *pair, frames) for pair in zip(report.phases, chosen, strict=True)],
        "frames": list(frames),
    }
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no name can end the script
    before, _, after = (files(__package__) / "page.html").read_text("utf-8").partition(f">{MARK}<")
    return f"{before}>{text}<{after}"


def _phase(report: Report, phase: PhaseReport, taken: Timeline, frames: dict[str, int]) -> dict[str, Any]:
    begin = taken.step.begin
    tracks = [
        {"name": thread_name(number), "slices": list(_with_depth(report, slices, begin, frames))}
        for number, slices in enumerate(taken.threads)
    ]
    return {
        "label": phase.label,
        "summary": summary(phase),
        "length": taken.step.end - begin,
        "rows": [cells(row, phase) for row in phase.rows],
        "tracks": tracks,
    }


def _with_depth(
    report: Report, slices: Sequence[Slice], begin: int, frames: dict[str, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Frame, depth, start and length of each slice, in nanoseconds of the step."""
    ends: list[int] = []
    for each in slices:
        while ends and ends[-1] <= each.start:
            ends.pop()
        frame = frames.setdefault(name_of(report, each), len(frames))
        yield frame, len(ends), each.start - begin, each.end - each.start
        ends.append(each.end)

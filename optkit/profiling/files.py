"""The files of a profile, bounded in size: a report, two traces for viewers and a page with a timeline."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from optkit.errors import UserError
from optkit.machine.paths import replace_text
from optkit.profiling.formats import chrome_trace, speedscope
from optkit.profiling.page import page
from optkit.profiling.report import Report
from optkit.profiling.timeline import Timeline

MOST_SLICES = 16_000  # in a file; about 1.6 MB of trace events and 1.3 MB for speedscope
MOST_PAGE_SLICES = 24_000


def write_profile(report: Report, directory: Path, prefix: str = "") -> list[Path]:
    """Write the files of ``report`` into ``directory``, which is made where it is missing; the files.

    The traces hold the steps of median time, and further steps while there is room (``MOST_SLICES``).

    Args:
        prefix: of the names.

    Raises:
        UserError: the files can't be written.
    """
    chosen = in_bounds(report, MOST_SLICES)
    contents: dict[str, Any] = {
        "json": report.to_dict(),
        "trace.json": chrome_trace(report, chosen),
        "speedscope.json": speedscope(report, chosen),
    }
    texts = {kind: msgspec.json.encode(content).decode() for kind, content in contents.items()}
    texts["html"] = page(report, [thinned(p.timeline, MOST_PAGE_SLICES) for p in report.phases])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = directory / free_name(directory, stem(prefix))
        files = {Path(f"{place}.{kind}"): text for kind, text in texts.items()}
        for file, text in files.items():
            replace_text(file, text)
    except OSError as error:
        what = f"the profile can't be written: {error.strerror}"
        raise UserError(what, where=str(error.filename or directory)) from error
    return list(files)


def stem(prefix: str) -> str:
    """The name of the files of a profile of now, without an ending."""
    return f"{prefix}profile-{time.strftime('%Y%m%d-%H%M%S')}"


def free_name(directory: Path, wanted: str) -> str:
    """``wanted``, with a number where ``directory`` has a profile of the name."""
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (directory / f"{name}.json").exists())


def in_bounds(report: Report, most: int) -> list[Timeline]:
    """The steps for a trace of up to ``most`` slices, in order of time: of median time first, then others."""
    medians = [phase.timeline for phase in report.phases]
    found = [thinned(each, most // max(1, len(medians))) for each in medians]
    left = most - sum(map(num_slices, found))
    for each in report.timelines:
        if not any(each is median for median in medians) and num_slices(each) <= left:
            found.append(each)
            left -= num_slices(each)
    return sorted(found, key=lambda each: each.step.begin)


def num_slices(taken: Timeline) -> int:
    return sum(map(len, taken.threads))


def thinned(taken: Timeline, most: int) -> Timeline:
    """``taken`` without the shortest of more than ``most`` slices."""
    count = num_slices(taken)
    if count <= most:
        return taken
    lengths = sorted((s.end - s.start for slices in taken.threads for s in slices), reverse=True)
    shortest = lengths[most]
    threads = [[s for s in slices if s.end - s.start > shortest] for slices in taken.threads]
    return replace(taken, threads=threads)

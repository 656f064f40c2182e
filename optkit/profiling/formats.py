"""Timelines in the formats of viewers: Chrome's trace events (Perfetto, chrome://tracing) and speedscope.

Chrome's format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Speedscope's:
https://www.speedscope.app/file-format-schema.json, evented profiles. Times count from the begin of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from optkit.profiling.report import Report
from optkit.profiling.timeline import Slice, Timeline
from optkit.version import VERSION

PROCESS = 1
MAIN, WORKER = "engine", "kernel thread"
SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


def thread_name(number: int) -> str:
    """The name of a thread of a timeline; 0 is the main one."""
    return f"{WORKER} {number}" if number else MAIN


def name_of(report: Report, each: Slice) -> str:
    return report.names[each.op] if each.op >= 0 else each.name


def chrome_trace(report: Report, chosen: Sequence[Timeline]) -> dict[str, Any]:
    """The steps ``chosen`` as trace events: complete events (``X``) that nest by time, in microseconds."""
    first = min((each.step.begin for each in chosen), default=0)
    threads = max((len(each.threads) for each in chosen), default=0)
    return {
        "traceEvents": [
            _named("process_name", 0, f"optkit {report.name}"),
            *(_named("thread_name", number, thread_name(number)) for number in range(threads)),
            *_events(report, chosen, first),
        ],
        "displayTimeUnit": "ms",
        "otherData": {"optkit": VERSION, "artifact": report.name, "target": report.target.name},
    }


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _events(report: Report, chosen: Sequence[Timeline], first: int) -> Iterator[dict[str, Any]]:
    for taken in chosen:
        for number, slices in enumerate(taken.threads):
            for each in slices:
                event = {
                    "name": name_of(report, each),
                    "ph": "X",
                    "ts": (each.start - first) / 1e3,
                    "dur": (each.end - each.start) / 1e3,
                    "pid": PROCESS,
                    "tid": number,
                }
                yield event | {"args": {"tokens": each.tokens}} if each.tokens else event


def speedscope(report: Report, chosen: Sequence[Timeline]) -> dict[str, Any]:
    """The steps ``chosen`` as evented profiles, a profile for each thread of a step."""
    frames: dict[str, int] = {}
    profiles = []
    for taken in chosen:
        for number, slices in enumerate(taken.threads):
            begin, end = taken.step.begin, taken.step.end
            profiles.append(
                {
                    "type": "evented",
                    "name": f"{taken.step.phase}, {thread_name(number)}",
                    "unit": "nanoseconds",
                    "startValue": 0,
                    "endValue": end - begin,
                    "events": list(_opened_and_closed(report, slices, begin, frames)),
                }
            )
    return {
        "$schema": SPEEDSCOPE,
        "name": f"optkit {report.name}",
        "exporter": f"optkit {VERSION}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def _opened_and_closed(
    report: Report, slices: Sequence[Slice], begin: int, frames: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """An event for the begin and the end of each slice, in order, inner ends before outer ends."""
    stack: list[tuple[int, int]] = []  # end and frame of the open slices

    def closed(until: int) -> Iterator[dict[str, Any]]:
        while stack and stack[-1][0] <= until:
            end, frame = stack.pop()
            yield {"type": "C", "frame": frame, "at": end - begin}

    for each in slices:
        yield from closed(each.start)
        frame = frames.setdefault(name_of(report, each), len(frames))
        yield {"type": "O", "frame": frame, "at": each.start - begin}
        stack.append((each.end, frame))
    yield from closed(max((end for end, _ in stack), default=0))

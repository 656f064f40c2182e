"""Files of a profile: bounded, written once, self-contained."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.profiling.files import MOST_SLICES, in_bounds, num_slices, thinned, write_profile
from optkit.profiling.report import Report
from optkit.profiling.timeline import Slice, Timeline
from tests.support.recorded import tiny_report

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def large(report: Report, slices: int) -> Report:
    """``report`` with ``slices`` more in each step."""

    def grown(taken: Timeline) -> Timeline:
        begin, length = taken.step.begin, taken.step.end - taken.step.begin
        starts = [begin + length * number // slices for number in range(slices + 1)]
        more = [Slice("x", start, end, 3) for start, end in pairwise(starts)]
        return replace(taken, threads=[*taken.threads, more])

    by_id = {id(taken): grown(taken) for taken in report.timelines}
    phases = tuple(replace(phase, timeline=by_id[id(phase.timeline)]) for phase in report.phases)
    return replace(report, phases=phases, timelines=tuple(by_id.values()))


def test_files_are_written_and_name_each_other_not(tmp_path: Path) -> None:
    first = write_profile(tiny_report(), tmp_path / "new" / "place", "model-")
    second = write_profile(tiny_report(), tmp_path / "new" / "place", "model-")
    assert sorted({file.name.split(".", 1)[1] for file in first}) == [
        *("html", "json", "speedscope.json", "trace.json")
    ]
    assert not set(first) & set(second) and all(file.is_file() for file in first + second)
    report = json.loads(next(file for file in first if file.suffixes == [".json"]).read_text())
    assert report["schema_version"] == 1 and set(report["phases"]) == {"prefill", "decode"}
    assert len(list((tmp_path / "new" / "place").iterdir())) == 8  # no temporary file stays


def test_files_of_a_large_profile_stay_below_5_mb_and_take_less_than_a_second(tmp_path: Path) -> None:
    report = large(tiny_report(), 30_000)
    start = time.perf_counter()
    files = write_profile(report, tmp_path)
    assert time.perf_counter() - start < 5  # one second on a quiet machine
    assert sum(file.stat().st_size for file in files) <= 5_000_000


def test_median_steps_come_first_and_the_shortest_slices_go() -> None:
    report = large(tiny_report(), 9_000)
    chosen = in_bounds(report, MOST_SLICES)
    assert sum(map(num_slices, chosen)) <= MOST_SLICES < sum(map(num_slices, report.timelines))
    begins = [each.step.begin for each in chosen]
    assert begins == sorted(begins) and {phase.timeline.step.begin for phase in report.phases} <= set(begins)
    assert all(each.threads[0][0].name.endswith(" step") for each in chosen)
    assert len(in_bounds(tiny_report(), MOST_SLICES)) == 4
    small = thinned(report.phases[0].timeline, 100)
    assert 0 < num_slices(small) <= 100


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the profile can't be written"):
        write_profile(tiny_report(), tmp_path / "file")

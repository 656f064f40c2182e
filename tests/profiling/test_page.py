"""The page of a profile: self-contained, and with the data of the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optkit.kernels.cpu import native
from optkit.profiling.files import write_profile
from optkit.profiling.page import page
from tests.support.browser import chromium, opened
from tests.support.recorded import tiny_report

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
CHROMIUM = chromium()


def test_page_asks_no_other_place_and_no_name_can_end_its_script() -> None:
    report = replace(tiny_report(), name="</script><script>alert(1)</script>")
    text = page(report, [phase.timeline for phase in report.phases])
    assert "default-src 'none'" in text and not re.search(r"(src|href)=|url\(|https?://|@import", text)
    assert text.count("</script>") == 2 and "alert(1)" in text
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["title"].startswith("Profile of </script>")
    assert [phase["label"].split()[0] for phase in data["phases"]] == ["prefill", "decode"]
    for phase in data["phases"]:
        assert all(len(row) == len(data["columns"]) for row in phase["rows"])
        for track in phase["tracks"]:
            for frame, depth, start, length in track["slices"]:
                assert (
                    frame < len(data["frames"])
                    and depth >= 0
                    and 0 <= start <= start + length <= phase["length"]
                )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: make browser, or OPTKIT_CHROMIUM")
def test_page_draws_a_timeline_without_a_problem_in_a_browser(tmp_path: Path) -> None:
    (file,) = (file for file in write_profile(tiny_report(), tmp_path) if file.suffix == ".html")
    with opened(CHROMIUM or "", file.as_uri(), tmp_path / "browser") as shown:
        shown.wait_for("document.querySelectorAll('tbody tr').length > 10")
        assert shown.evaluate("document.querySelectorAll('canvas').length") == 2
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        pixels = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 30, 200, 1).data]"
        assert shown.evaluate(f"new Set({pixels}).size") > 3  # something was drawn
        assert shown.problems == []

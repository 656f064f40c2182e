"""Reports in headless Chromium: quiet, self-contained, and whole at every width; ``make browser`` runs this.

With ``OPTKIT_REPORT_PAGE`` the tests open that page instead of the sample, and ``OPTKIT_SCREENSHOTS`` names a
directory for the pictures of docs/reports.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.evaluation.saved import read_eval
from optkit.pipeline.records import RunRecord
from optkit.report.bench_file import Bench
from optkit.report.document import Sources, report_page
from tests.pipeline.test_report_page import ATTACK, attacked, report
from tests.report.test_document import evaluation, hostile_bench
from tests.support.browser import Page, chromium, opened
from tests.support.sample_artifact import int8_record, sample_run
from tests.support.sample_bench import PARTS, bench_result, record

CHROMIUM = chromium()
WIDE, PHONE, SMALLEST = 1100, 375, 320
LONG = "a_name_without_a_single_break_" * 12

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make browser")


def sample(folder: Path) -> Sources:
    """Every section, with three loads, many requests and names of any length."""
    run = sample_run()
    candidates = {"weights": [int8_record(name="gptq"), int8_record(name=LONG, decision="not chosen")]}
    run = RunRecord(run.passes, run.whole, candidates, notes=[LONG])
    benches = []
    for load in (1, 2, 3):
        own = [[record(i, 0.1 * load + 0.001 * i, prompt=100, ttft_details=PARTS) for i in range(60)]]
        sides = {"optkit": own, "baseline": [[record(i, 0.9, tpot=0.05) for i in range(60)]], LONG: own}
        benches.append(Bench(f"load {load}", bench_result(sides)))
    return Sources(report(run, model=LONG), benches, [read_eval(evaluation(folder))])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("report")
    file = Path(os.environ.get("OPTKIT_REPORT_PAGE") or folder / "report.html").resolve()
    if "OPTKIT_REPORT_PAGE" not in os.environ:
        file.write_text(report_page(sample(folder)))
    with opened(str(CHROMIUM), file.as_uri(), folder / "profile") as found:
        yield found


def overflowing(page: Page) -> list[str]:
    """Elements that reach beyond the right edge, apart from the content of areas that scroll by themselves."""
    return page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg'))"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )


@pytest.mark.parametrize("width", [WIDE, PHONE, SMALLEST])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_every_width_without_errors_and_requests(page: Page, width: int, scheme: str) -> None:
    page.show_as(width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert overflowing(page) == []
    assert page.problems == [] and page.requests == [page.evaluate("location.href")]


def test_text_in_charts_is_large_enough_on_a_phone(page: Page) -> None:
    page.show_as(PHONE)
    sizes = page.evaluate(
        "[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)"
    )
    assert len(sizes) > 50 and min(sizes) >= 10


def test_chart_texts_stay_inside_their_charts(page: Page) -> None:
    page.show_as(WIDE)
    outside = page.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(svg => { const box = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('text, rect')].filter(e => { const b = e.getBoundingClientRect();"
        "return b.left < box.left - 2 || b.right > box.right + 2 || b.bottom > box.bottom + 2; })"
        ".map(e => e.textContent || e.outerHTML); })"
    )
    assert outside == []


def contrast(page: Page, selector: str) -> float:
    """The least WCAG contrast between the color of elements and the page."""
    return page.evaluate(
        "(() => { const lum = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)"
        ".map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);"
        "return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };"
        "const paper = lum(getComputedStyle(document.body).backgroundColor);"
        f"return Math.min(...[...document.querySelectorAll('{selector}')].map(e => lum(getComputedStyle(e).color))"
        ".map(l => (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05))); })()"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_stand_out_from_the_page(page: Page, scheme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for the marks of charts."""
    page.show_as(WIDE, scheme=scheme)
    assert contrast(page, "p, td, th, a, summary, figcaption, dt, dd, small") >= 4.5
    assert contrast(page, ".dots, .bar, .line") >= 3


def test_the_keyboard_reaches_links_tables_and_details(page: Page) -> None:
    page.show_as(WIDE)
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    focusable = page.evaluate(
        "[...document.querySelectorAll('a, summary, [tabindex]')].every(e => { e.focus({preventScroll: true});"
        "return document.activeElement === e; })"
    )
    assert focusable
    page.evaluate("document.querySelector('details').open = false; document.querySelector('summary').focus()")
    for kind in ("keyDown", "keyUp"):
        page.send(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            windowsVirtualKeyCode=13,
            text="\r",
        )
    assert page.evaluate("document.querySelector('details').open")


def test_every_chart_has_a_name_and_its_numbers(page: Page) -> None:
    assert page.evaluate(
        "[...document.querySelectorAll('svg')].every(e => e.getAttribute('role') === 'img'"
        " && e.getAttribute('aria-label').length > 10 && e.closest('figure').querySelector('table td'))"
    )


def test_paper_shows_closed_parts_and_no_navigation(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = false; })")
    page.show_as(700, media="print", scheme="dark")
    try:
        assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        shown = page.evaluate(
            "document.querySelector('details.pass, .pass details').querySelector('p').offsetHeight"
        )
        assert shown > 0
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    finally:
        page.show_as(WIDE)


def test_pictures(page: Page, tmp_path: Path) -> None:
    folder = Path(os.environ.get("OPTKIT_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    last = "[...document.querySelectorAll('#latency .charts')].at(-1)"
    for name, width, height, scheme in (
        ("report-wide", WIDE, 1260, "light"),
        ("report-phone", PHONE, 1260, "dark"),
    ):
        page.show_as(width, scheme=scheme)
        top = page.evaluate(f"{last}.getBoundingClientRect().top + scrollY")
        picture = page.screenshot(width, height, top)
        assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (width, height)
        (folder / f"{name}.png").write_bytes(picture)


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    hostile = read_eval(evaluation(tmp_path, model=ATTACK, against=ATTACK))
    file = tmp_path / "report.html"
    file.write_text(report_page(Sources(attacked(), [hostile_bench()], [hostile])))
    with opened(str(CHROMIUM), file.as_uri(), tmp_path / "profile") as found:
        found.show_as(PHONE)
        assert found.evaluate("document.images.length + document.scripts.length") == 0
        assert found.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert found.evaluate("document.body.innerText").count("alert('x')") > 10
        assert found.problems == [] and len(found.requests) == 1

"""report.html: complete, self-contained, and nothing in it can be markup; and what the terminal shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from optkit.pipeline.records import RunRecord
from optkit.pipeline.report import report_html, run_table, summary_lines
from tests.support.sample_artifact import TARGET, int8_record, sample_run

ATTACK = "<script>alert('x')</script><img src=x onerror=y>&\"'"
VOID = {"meta"}


class Page(HTMLParser):
    """Collects tags, attributes and text; fails where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def report(run: RunRecord | None = None, **changes: Any) -> dict[str, Any]:
    content = (run or sample_run()).to_dict()
    return {"model": "small", "recipe": "ttft-cpu", "target": TARGET, **content, **changes}


def test_the_page_has_decisions_reasons_speed_bytes_and_quality() -> None:
    words = Page(report_html(report())).words
    for expected in (
        "small by ttft-cpu",
        "no site to change",
        "rolled back: prefill speedup 0.900 is below 1.000",
        "on the ignore list",
        "measured 4.00x",
        "predicted 2.00x, measured 2.00x",
        "400.0 to 100.0 MB",
        "0.004 ± 0.001",
        "0.9800 ± 0.001",
        "1.0030 ± 0.001",
        "99th percentile KL",
    ):
        assert expected in words


def attacked() -> dict[str, Any]:
    """A report where every text that can come from a file is hostile."""
    record = int8_record(
        name=ATTACK,
        config={ATTACK: ATTACK},
        skips=[{"reason": ATTACK, "count": 1, "first": ATTACK}],
        reason=ATTACK,
        decision=ATTACK,
        predicted={ATTACK: [2.0, 1.0]},
        measured={ATTACK: int8_record().measured["decode@513"]},
    )
    run = RunRecord([record], record)
    return report(run, model=ATTACK, recipe=ATTACK, target=TARGET | {"name": ATTACK, "source": ATTACK})


def test_everything_is_escaped() -> None:
    hostile, harmless = Page(report_html(attacked())), Page(report_html(report()))
    assert hostile.tags == harmless.tags
    assert hostile.attributes == harmless.attributes
    assert ATTACK in hostile.words


@pytest.mark.parametrize("content", [report(), attacked()], ids=["usual", "hostile"])
def test_the_page_fetches_nothing(content: dict[str, Any]) -> None:
    page = Page(report_html(content))
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"})
    assert page.attributes.isdisjoint({"src", "href", "style", "onload", "onerror"})
    assert not re.search(r"url\(|@import|https?:", report_html(content))


def test_a_run_that_kept_nothing_says_so() -> None:
    run = RunRecord([int8_record(decision="rolled back")], None)
    assert "No pass was kept" in Page(report_html(report(run))).words
    assert summary_lines(run)[0].startswith("no pass was kept")


def shown(run: RunRecord) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(run_table(run))
    return capture.get()


def test_the_table_has_a_row_a_pass_and_one_for_the_whole() -> None:
    rows = {line.split()[0]: line for line in shown(sample_run()).splitlines() if line.strip()}
    assert re.search(r"kept +2 +4\.00x \(4\.00\) +1\.00x \(4\.00\) +2\.00x \(2\.00\)", rows["int8"])
    assert "rolled back" in rows["flash_attention"]
    assert rows["fuse_qkv"].split()[1:] == ["skipped", "0", "-", "-", "-", "-", "-", "-"]
    assert "100 MB" in rows["whole"]


def test_pass_names_are_not_markup() -> None:
    assert "[bold]x" in shown(RunRecord([int8_record(name="[bold]x")], None))


def test_the_summary_has_the_gain_and_what_was_not_kept() -> None:
    first, *others = summary_lines(sample_run())
    assert "prefill 128 4.00x" in first
    assert "400.0 to 100.0 MB" in first
    assert others[0].startswith("int8 kept: prefill 2.00x; prefill 128: predicted 4.00x, measured 4.00x; ")
    assert "prefill 512: predicted 4.00x, measured 1.00x, less than predicted" in others[0]
    assert others[1] == "fuse_qkv skipped: no site to change"
    assert others[2].startswith("flash_attention rolled back: prefill speedup 0.900 is below 1.000; ")
    assert others[3].startswith(
        "3 of 9 predictions are more than 20% off: int8, prefill 512: predicted 4.00x"
    )

"""Sections of plans, profiles and tunings, on the page and in Markdown."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.kernels.cpu import native
from optkit.report.document import Sources, report_page, sections
from optkit.report.markdown import report_markdown
from optkit.report.result_sections import profile_rows
from optkit.report.saved_results import SavedPlan, SavedProfile, SavedTuning, read_result
from tests.pipeline.test_report_page import ATTACK
from tests.support.parsed_page import ParsedPage
from tests.support.saved_results import plan_file, profile_file, tuning_file

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@needs_native
def test_each_result_has_its_section_on_the_page_and_in_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_result(SavedPlan, plan_file(tmp_path, monkeypatch))
    profile = read_result(SavedProfile, profile_file(tmp_path))
    tuning = read_result(SavedTuning, tuning_file(tmp_path))
    sources = Sources(plans=[plan], profiles=[profile], tunings=[tuning])
    shown = [section.key for section in sections(sources) if section.body]
    assert shown == ["tune", "profile", "plan"]
    parsed, text = ParsedPage(report_page(sources)), report_markdown(sources)
    parsed.assert_self_contained()
    for words in (
        "Held by recipe ttft-cpu, max_num_seqs=4",
        "ttft_p95 453 ms",
        "prefill 64",
        "Replicas: 1 for",
    ):
        assert words in parsed.words and words.replace("_", "\\_") in text
    assert "race round 0 ttft-cpu" in parsed.words and "a processor" in parsed.words


def test_without_results_the_page_says_the_commands() -> None:
    words = ParsedPage(report_page(Sources(tunings=[]))).words.partition("Not in this report")[2]
    for command in ("optkit plan MODEL", "optkit profile artifact/", "optkit tune MODEL"):
        assert command in words


def test_what_was_not_shown_is_said_with_the_advice(tmp_path: Path) -> None:
    tuning = read_result(SavedTuning, tuning_file(tmp_path, held=False))
    words = ParsedPage(report_page(Sources(tunings=[tuning]))).words
    for line in (
        "Not shown by recipe ttft-cpu",
        "9 of 59 requests miss it",
        "what binds: computing the prompt",
    ):
        assert line in words


@needs_native
def test_rows_beyond_the_most_are_one_row_and_nothing_is_lost(tmp_path: Path) -> None:
    profile = read_result(SavedProfile, profile_file(tmp_path))
    phase = profile.phases["decode"]
    rows = profile_rows(phase, most=3)
    assert len(rows) == 4 and rows[3][0] == f"{len(phase.rows) - 3} more"
    total = sum(float(row[3].removesuffix(" ms")) for row in rows)
    assert total == pytest.approx(1e3 * phase.seconds, rel=0.02)


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    tuning = read_result(SavedTuning, tuning_file(tmp_path)).model_copy(
        update={"objective": ATTACK, "claim": ATTACK, "notes": [ATTACK], "reasons": [ATTACK]}
    )
    sources = Sources(tunings=[tuning])
    ParsedPage(report_page(sources)).assert_self_contained()
    assert "<script" not in report_markdown(sources)

"""The tables and sentences of a run in the terminal."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import Console

from optkit.pipeline.records import RunRecord
from optkit.pipeline.report import run_table, summary_lines
from tests.support.sample_artifact import int8_record, sample_run


def shown(run: RunRecord) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(run_table(run))
    return capture.get()


def test_the_summary_of_a_run_that_kept_nothing_says_so() -> None:
    run = RunRecord([int8_record(decision="rolled back")], None)
    assert summary_lines(run)[0].startswith("no pass was kept")


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


def test_the_summary_has_the_reason_for_each_candidate() -> None:
    skipped = int8_record(name="w4a8", decision="skipped", reason="no site to change")
    run = replace(sample_run(), alternatives={"layers": [skipped]})
    assert "layers, w4a8 skipped: no site to change" in summary_lines(run)

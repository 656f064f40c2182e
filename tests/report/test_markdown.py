"""Markdown for pull requests: verdict first, short tables, no live markup."""

from __future__ import annotations

import pytest

from optkit.bench.workload import WorkloadConfig
from optkit.report.bench_file import Bench
from optkit.report.document import Sources
from optkit.report.markdown import escaped, markdown_table, report_markdown
from tests.pipeline.test_report_page import report
from tests.support.sample_bench import bench_result, record


def test_the_verdict_comes_first() -> None:
    text = report_markdown(Sources(report(), [Bench("one", bench_result())]))
    assert text.startswith("### small by ttft-cpu\n\n- prefill 128: **4.00x**")
    assert text.index("TTFT p50, optkit: **201 ms** (0.20x baseline)") < text.index("| pass |")
    assert "| int8 | kept | 2 | 4.00x (4.00) |" in text
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_worse_numbers_and_disturbed_measurements_are_called_so() -> None:
    slower = bench_result({"new": [[record(0, 1.0)]], "old": [[record(0, 0.5)]]})
    text = report_markdown(Sources(None, [Bench("one", slower, ["the machine was busy"])]))
    assert "(2.00x old) **worse**" in text and "> **Disturbed**, one: the machine was busy" in text


def test_a_sweep_is_a_table_of_its_loads() -> None:
    loads = [
        Bench(f"s, {rate}/s", bench_result(config=WorkloadConfig(request_rate=rate)), [], ["held"], "s")
        for rate in (2.0, 1.0)
    ]
    text = report_markdown(Sources(None, loads))
    assert text.startswith("### s\n") and text.index("| s, 1.0/s | optkit |") < text.index(
        "| s, 2.0/s | optkit |"
    )
    assert "| 201 | not shown | 10 | held |" in text and "fewer than 59 requests" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("a\nb", "a b"),
        ("<b>", "&lt;b&gt;"),
        ("@someone", "&#64;someone"),
        ("https://x.y", "https&#58;//x.y"),
        ("[a](b)", r"\[a\](b)"),
        ("`x` *y* _z_ ~~q~~", r"\`x\` \*y\* \_z\_ \~\~q\~\~"),
        ("# a", r"\# a"),
        ("- a", r"\- a"),
        ("a-b (1.5)", "a-b (1.5)"),
        ("$x$", r"\$x\$"),
        ("a\\", r"a\\"),
    ],
)
def test_escaped(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_a_table_has_a_line_for_each_row() -> None:
    assert (
        markdown_table(("a", "b"), [("x", "1"), ("y", "2")]) == "| a | b |\n|---|---:|\n| x | 1 |\n| y | 2 |"
    )

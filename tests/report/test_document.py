"""The whole report: sections of what is given, commands for what is not, and nothing that is not escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.evaluation.saved import read_eval
from optkit.pipeline.report_page import report_html
from optkit.report.bench_file import Bench, read_benches
from optkit.report.document import Sources, report_page, sections
from optkit.report.markdown import report_markdown
from tests.pipeline.test_report_page import ATTACK, attacked, report
from tests.support.parsed_page import ParsedPage
from tests.support.sample_artifact import estimate, quality
from tests.support.sample_bench import bench_result, record


def evaluation(folder: Path, name: str = "eval", **changes: Any) -> Path:
    """A file of optkit eval."""
    scores = [
        {"first": 0, "last": 15, "kl": estimate(0.002), "top1_agreement": estimate(0.97)},
        {"first": 16, "last": 31, "kl": estimate(0.004), "top1_agreement": estimate(0.96)},
    ]
    greedy = {"prompt_tokens": 64, "tokens": 64, "lengths": [64, 10, 40, 64]}
    data = quality() | {"by_position": scores, "greedy": greedy, "model": "artifact", "against": "small"}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(data | changes))
    return file


def test_all_sources_give_all_sections(tmp_path: Path) -> None:
    sources = Sources(report(), [Bench("one", bench_result())], [read_eval(evaluation(tmp_path))])
    shown = [section.key for section in sections(sources) if section.body]
    expected = ["whole", "passes", "latency", "prompts", "parts", "memory", "quality", "environment"]
    assert shown == expected
    parsed = ParsedPage(report_page(sources))
    parsed.assert_self_contained()
    for words in (
        "TTFT p50, optkit",
        "KL divergence by position",
        "median 52 of 64",
        "a processor",
        "roofline floor",
    ):
        assert words in parsed.words


def test_what_is_missing_is_told_with_its_command() -> None:
    words = ParsedPage(report_page(Sources(report()))).words
    for command in ("optkit bench artifact/", "optkit eval artifact/", "--request-rate"):
        assert command in words.partition("Not in this report")[2]
    bench_only = ParsedPage(report_page(Sources(None, [Bench("one", bench_result())]))).words
    assert "optkit optimize MODEL" in bench_only and "one" in bench_only


def test_the_artifact_s_own_page_has_the_same_sections() -> None:
    own, whole = report_html(report()), report_page(Sources(report()))
    for section in sections(Sources(report())):
        if section.body:
            assert f'id="{section.key}"' in own and f'id="{section.key}"' in whole


def hostile_bench() -> Bench:
    sides = {ATTACK: [[record(0, 0.1)]], f"{ATTACK}2": [[record(0, 0.2, error=ATTACK)]]}
    result = bench_result(sides, cpu=ATTACK, command=[ATTACK], packages={ATTACK: ATTACK}, isa=[ATTACK])
    return Bench(ATTACK, result, [ATTACK])


def test_no_text_of_any_file_becomes_markup(tmp_path: Path) -> None:
    hostile = read_eval(evaluation(tmp_path, model=ATTACK, against=ATTACK, environment={"cpu": ATTACK}))
    sources = Sources(attacked(), [hostile_bench()], [hostile])
    parsed = ParsedPage(report_page(sources))
    parsed.assert_self_contained()
    assert parsed.words.count(ATTACK) > 20
    text = report_markdown(sources)
    assert "<script" not in text and "<img" not in text


@pytest.mark.parametrize(
    "environment", [{"cores": "two", "load_average": []}, {"isa": 3, "packages": None}, {}]
)
def test_a_strange_environment_breaks_nothing(tmp_path: Path, environment: dict[str, Any]) -> None:
    data = bench_result().to_dict() | {"environment": environment}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(data))
    ParsedPage(report_page(Sources(None, [read_benches(file)[0]])))

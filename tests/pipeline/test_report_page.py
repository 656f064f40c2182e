"""report.html: complete, self-contained, and nothing in it can be markup."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from optkit.pages.charts import Series
from optkit.pipeline.records import RunRecord
from optkit.pipeline.report_page import BELOW_FLOOR, FLOOR_NOTE, floor_at, prompts_section, report_html
from tests.support.parsed_page import ParsedPage
from tests.support.sample_artifact import TARGET, int8_record, quality, sample_run, timing

ATTACK = "<script>alert('x')</script><img src=x onerror=y>&\"'"
MEMORY = {
    "weight_bytes": 143_000_000,
    "token_bytes": 12_240,
    "sequence_bytes": 0,
    "pool_bytes": 268_435_456,
    "kv_tokens": 21_920,
    "max_model_len": 8192,
    "step_tokens": 2048,
    "activation_bytes": 48_000_000,
}


def report(run: RunRecord | None = None, **changes: Any) -> dict[str, Any]:
    content = (run or sample_run()).to_dict()
    facts = {"floor": [[128, 0.03], [512, 0.12]], "memory": MEMORY}
    return {"model": "small", "recipe": "ttft-cpu", "target": TARGET, **facts, **content, **changes}


def test_the_page_has_decisions_reasons_speed_bytes_and_quality() -> None:
    words = ParsedPage(report_html(report())).words
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


def test_the_page_has_floor_memory_and_candidates() -> None:
    records = [int8_record(name="gptq"), int8_record(name="awq", decision="not chosen")]
    run = RunRecord([int8_record()], int8_record(name="whole"), {"weights": records})
    words = ParsedPage(report_html(report(run))).words
    for expected in (
        "Candidates: weights",
        "not chosen",
        "roofline floor",
        "21,920",
        "12,240 bytes",
        "weights100 MB",
        "activations of a step of 2,048 tokens",
    ):
        assert expected in words
    assert "tokens that the KV cache holds" in words


def test_a_report_of_an_earlier_version_has_no_floor_and_no_memory_plan() -> None:
    old = report()
    del old["floor"], old["memory"]
    words = ParsedPage(report_html(old)).words
    assert "roofline floor" not in words and "KV cache" not in words


def attacked() -> dict[str, Any]:
    """A report where every text that can come from a file is hostile."""
    record = int8_record(
        name=ATTACK,
        config={ATTACK: ATTACK},
        skips=[{"reason": ATTACK, "count": 1, "first": ATTACK}],
        reason=ATTACK,
        decision=ATTACK,
        fallback=[ATTACK],
        predicted={ATTACK: [2.0, 1.0]},
        measured={ATTACK: int8_record().measured["decode@513"]},
    )
    run = RunRecord([record], record, {ATTACK: [record]}, notes=[ATTACK])
    target = TARGET | {"name": ATTACK, "source": ATTACK, "isa": [ATTACK]}
    return report(
        run,
        model=ATTACK,
        recipe=ATTACK,
        target=target,
        memory=MEMORY | {"refusal": ATTACK},
        evaluation={"text": ATTACK, "sha256": ATTACK},
        machine={"cpu": ATTACK},
        environment={ATTACK: ATTACK},
    )


def test_everything_is_escaped() -> None:
    parsed = ParsedPage(report_html(attacked()))
    parsed.assert_self_contained()
    assert ATTACK in parsed.words


def test_the_page_fetches_nothing() -> None:
    ParsedPage(report_html(report())).assert_self_contained()
    assert "http" not in report_html(report()).replace("http-equiv", "")


def test_a_run_that_kept_nothing_says_so() -> None:
    run = RunRecord([int8_record(decision="rolled back")], None)
    assert "No pass was kept" in ParsedPage(report_html(report(run))).words


def test_missed_bounds_stand_at_the_start() -> None:
    missed = RunRecord([int8_record()], int8_record(), missed_bounds="prefill speedup 1.2 is below 2")
    assert (
        "The bounds of the recipe are missed: prefill speedup 1.2 is below 2."
        in ParsedPage(report_html(report(missed))).words
    )
    assert "are missed" not in ParsedPage(report_html(report())).words


def test_quality_that_is_not_a_number_breaks_nothing() -> None:
    broken = int8_record(quality=quality(kld=nan, top1=nan, ln_ppl_ratio=nan))
    parsed = ParsedPage(report_html(report(RunRecord([broken], broken))))
    parsed.assert_self_contained()
    assert "nan nats" in parsed.words


def test_a_disturbed_measurement_is_named() -> None:
    disturbed = {"median": 0.4, "q1": 0.2, "q3": 0.9}
    record = int8_record(measured={"prefill 128": [timing(0.5), disturbed], "decode@9": [timing(0.5)] * 2})
    words = ParsedPage(report_html(report(RunRecord([record], None)))).words
    assert "Other work disturbed 1 measurements" in words and "int8, prefill 128: 0.2 to 0.9 s" in words


def test_the_floor_lies_between_its_points_and_a_time_below_it_is_told() -> None:
    floor = Series("roofline floor", [(128.0, 30.0), (512.0, 126.0)], None)
    assert floor_at(floor, 320.0) == pytest.approx(78.0)
    above = prompts_section(floor, [Series("a", [(320.0, 79.0)])])
    below = prompts_section(floor, [Series("a", [(320.0, 77.0)])])
    told = ["".join(section.body) for section in (above, below)]
    assert all("No kernel can be faster" in FLOOR_NOTE and "No kernel can be faster" in text for text in told)
    assert BELOW_FLOOR not in told[0] and BELOW_FLOOR in told[1]
    assert "98.7" in told[0]  # 78 / 79, as a share of the roofline
    assert prompts_section(floor, []).body == []
    assert "roofline" not in "".join(prompts_section(None, [Series("a", [(320.0, 79.0)])]).body)

"""The tokens of experts in reports: spread, and experts named with their tokens."""

from __future__ import annotations

from optkit.pipeline.expert_coverage import HEADER, named, rows, summary

STATS = {
    "expert_tokens": {"a.experts.down_proj": [900, 3, 100, 0], "b.experts.down_proj": [70, 80, 90, 64]},
    "expert_tokens_needed": 64,
    "rounded_experts": {"a.experts.down_proj": {"1": 3, "3": 0}},
}


def test_a_row_has_the_spread_and_names_rounded_experts() -> None:
    first, second = rows(STATS)
    assert first == ("a.experts.down_proj", "0, 52, 900", "1 (3 tokens), 3 (0 tokens)")
    assert second == ("b.experts.down_proj", "64, 75, 90", "none")
    assert len(first) == len(HEADER) and list(rows({})) == []


def test_many_experts_are_counted_after_the_first() -> None:
    text = named({str(expert): 0 for expert in range(20)})
    assert text.count("tokens") == 16 and text.endswith("and 4 more")


def test_summary_is_a_line_for_a_pass_that_calibrated_experts() -> None:
    assert summary(STATS).startswith("2 of 8 weights of experts saw fewer than 64 calibration tokens")
    assert "1 (3 tokens)" in summary(STATS)
    assert summary({**STATS, "rounded_experts": {}}).startswith("all 8 weights of experts saw 64")
    assert summary({"calibration_tokens": 5}) == ""

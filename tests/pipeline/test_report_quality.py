"""Quality on the page: by position, and greedy continuations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.evaluation.saved import Evaluation, Quality
from optkit.pipeline.report_quality import greedy_text, quality_section, quality_table, survival
from tests.support.parsed_page import ParsedPage
from tests.support.sample_artifact import quality


def evaluation(**changes: object) -> Evaluation:
    return Evaluation("a", "b", {"": Quality.model_validate(quality() | changes)}, {})


def test_rows_without_numbers_are_left_out() -> None:
    rows = dict(quality_table(evaluation()))
    assert rows["mean KL divergence, nats"] == "0.004 ± 0.001" and rows["top-1 agreement"] == "98.0% ± 0.1%"
    assert "mean KL divergence, nats, at least" not in rows and "equal greedy tokens" not in rows


def test_charts_need_their_numbers() -> None:
    plain = "".join(quality_section([evaluation()]).body)
    assert "<svg" not in plain and not quality_section([]).body
    scores = [
        {"first": 0, "last": 15, "kl": {"value": 0.1}, "top1_agreement": {"value": 0.9}},
        {"first": 16, "last": 31, "kl": {"value": None}, "top1_agreement": {"value": None}},
    ]
    greedy = {"prompt_tokens": 8, "tokens": 4, "lengths": [4, 0, 2]}
    shown = "".join(quality_section([evaluation(by_position=scores, greedy=greedy)]).body)
    assert shown.count("<svg") == 3
    ParsedPage(shown)


def test_long_documents_are_a_table_and_a_chart() -> None:
    loss = {"value": 0.25, "stderr": 0.01}
    score = {"questions": 4, "logprob": {"value": -0.5}, "exact": 0.75, "gain": {"value": 2.0}, "loss": loss}
    long = {
        "documents": 2,
        "tokens": 2000,
        "loss": loss,
        "tasks": [
            {"task": "needle", "length": 1024, "signal": True, "score": score},
            {"task": "qa", "length": 1024, "signal": False, "score": score},
        ],
        "positions": [{"first": 0, "last": 15, "kl": {"value": 0.1}, "top1_agreement": {"value": 0.9}}],
    }
    shown = "".join(quality_section([evaluation(long=long)]).body)
    ParsedPage(shown)
    assert "0.25 ± 0.01" in shown and "qa (no signal)" in shown and shown.count("<svg") == 1


def test_greedy_text() -> None:
    quality_of = evaluation(greedy={"prompt_tokens": 8, "tokens": 4, "lengths": [4, 0, 2, 1]}).variants[""]
    assert greedy_text(quality_of) == "median 1.5 of 4, 1 of 4 without a difference"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_survival_ends_at_the_share_without_a_difference(lengths: list[int]) -> None:
    points = survival(lengths, 20)
    shares = [share for _, share in points]
    assert points[0] == (0.0, 100.0) and shares == sorted(shares, reverse=True)
    assert points[-1] == (20.0, pytest.approx(100 * sum(n >= 20 for n in lengths) / len(lengths)))
    for tokens, after in points[1:-1]:
        assert after >= 100 * sum(n > tokens for n in lengths) / len(lengths) - 1e-9

"""Scores: predictions between the reported ones, and a queue rebuilt from reports and what was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.score import MOST_SENT, Backlog, prefill_seconds
from optkit.runtime.report import PREFILL_TOKENS
from optkit.runtime.scheduling.cost_model import CostModel, chunk_work

TABLE = (0.01, 0.1, 0.2, 0.5, 1.3)


def test_predictions_are_the_reported_ones_and_lines_between_and_beyond() -> None:
    assert [prefill_seconds(TABLE, tokens) for tokens in PREFILL_TOKENS] == pytest.approx(TABLE)
    assert prefill_seconds(TABLE, 384) == pytest.approx(0.15)
    assert prefill_seconds(TABLE, 1536) == pytest.approx(0.9)
    assert prefill_seconds(TABLE, 4096) == pytest.approx(1.3 + 2 * 0.8)


def test_without_predictions_fewer_tokens_are_still_less() -> None:
    assert 0 < prefill_seconds((), 10) < prefill_seconds((), 1000) < 0.01


@given(st.integers(1, 2048))
def test_between_the_reported_lengths_the_error_of_a_line_is_small(tokens: int) -> None:
    """Against the cost model with the attention of a small model: quadratic, but nearly straight over a piece."""
    model = CostModel()
    for count in (1, 64, 512, 2048):
        for _ in range(20):
            model.observe(chunk_work(count, 0, rows=1), 5e-3 + count / 3000 + 2e-8 * count * count / 2)
    table = tuple(model.prefill_seconds(max(1, count)) for count in PREFILL_TOKENS)
    assert prefill_seconds(table, tokens) == pytest.approx(model.prefill_seconds(tokens), rel=0.02, abs=5e-4)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), max_size=20), st.floats(0, 5))
def test_a_backlog_is_a_queue_of_one_server(sent: list[tuple[float, float]], ahead: float) -> None:
    backlog, now, work, before = Backlog(), 0.0, ahead, 0.0
    backlog.report(ahead, 0.0)
    for pause, seconds in sent:
        now += pause
        work = max(0.0, work - (now - before))  # the server worked since
        before = now
        assert backlog.seconds(now) == pytest.approx(work)
        backlog.send(seconds, now)
        work += seconds
    assert backlog.seconds(now) == pytest.approx(work)


def test_a_report_counts_and_so_does_what_was_sent_after_its_question() -> None:
    backlog = Backlog()
    backlog.send(1.0, 10.0)
    backlog.send(2.0, 11.0)
    backlog.report(0.5, 10.5)  # asked between the two: the first is in the report
    assert backlog.seconds(11.0) == pytest.approx(2.0)
    backlog.report(4.0, 11.5)
    assert backlog.seconds(12.0) == pytest.approx(3.5)


def test_a_prompt_taken_back_leaves_the_queue_once() -> None:
    backlog = Backlog()
    backlog.send(1.0, 0.0)
    backlog.send(3.0, 0.0)
    backlog.take_back(3.0, 0.5, sent=0.0)
    backlog.take_back(3.0, 0.5, sent=0.0)
    assert backlog.seconds(0.5) == pytest.approx(0.5)
    backlog.report(2.0, 1.0)
    backlog.take_back(1.0, 1.0, sent=0.0)
    assert backlog.seconds(1.0) == pytest.approx(2.0), "the report knows"


def test_a_backlog_without_reports_is_bounded() -> None:
    backlog = Backlog()
    for _ in range(2 * MOST_SENT):
        backlog.send(0.1, 0.0)
    assert len(backlog.sent) == MOST_SENT

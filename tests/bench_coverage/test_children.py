"""A trial in a child process ends with an outcome, whatever becomes of the process."""

from __future__ import annotations

from bench.coverage.children import outcome_of
from bench.coverage.sizes import NOT_TRIED
from bench.coverage.trial import REFUSED


def test_outcome_is_a_refusal_when_the_type_does_not_exist() -> None:
    outcome = outcome_of("no_such_type")
    assert outcome.state == REFUSED and "no_such_type" in outcome.reason


def test_outcome_is_a_refusal_when_the_time_is_over() -> None:
    outcome = outcome_of("llama", seconds=1)
    assert (outcome.state, outcome.reason) == (REFUSED, "no result within 1 s")


def test_outcome_has_the_reason_when_the_type_is_not_tried() -> None:
    name, reason = next(iter(NOT_TRIED.items()))
    assert outcome_of(name).reason == f"not tried: {reason}"

"""Verdicts over rounds of hand-made paired runs: side a takes 1/2, 1/3 and 1/4 of side b's first-token time."""

from __future__ import annotations

import pytest

from optkit.bench.result import BenchResult
from optkit.bench.verdict import Verdict, verdicts
from tests.support.paired_run import made


def turned(result: BenchResult) -> BenchResult:
    """The same turns with the sides in the other order: the candidate is the slower side."""
    return BenchResult(result.config, result.sides[::-1], result.turns, result.slo, result.definitions)


def test_verdict_is_faster_where_all_rounds_are_faster():
    (verdict,) = verdicts(made(), "ttft")
    assert verdict.ratios == pytest.approx((1 / 2, 1 / 3, 1 / 4))
    assert verdict.faster and not verdict.worse
    assert verdict.line() == "objective ttft: 0.25 to 0.50 of b: faster"


def test_verdict_is_worse_where_all_rounds_are_slower():
    (verdict,) = verdicts(turned(made()), "ttft")
    assert verdict.worse and not verdict.faster
    assert verdict.line() == "objective ttft: 2.00 to 4.00 of a: WORSE"


@pytest.mark.parametrize("ratios", [(0.9, 1.2), (1.01, 1.5), (1.0, 1.0)])
def test_verdict_is_neither_where_rounds_disagree_or_differ_by_noise(ratios: tuple[float, ...]) -> None:
    verdict = Verdict("ttft", "baseline", ratios)
    assert not verdict.faster and not verdict.worse
    assert verdict.line().endswith("of baseline: not faster")


def test_throughput_is_a_cost_upside_down():
    result = made()
    (verdict,) = verdicts(result, "throughput")
    rates = result.ratios("b", ("output_throughput",))
    assert verdict.ratios == pytest.approx(tuple(1 / rate for rate in rates))


@pytest.mark.parametrize("slow", [False, True])
def test_the_objective_memory_compares_requests_and_calls_none_worse(slow: bool) -> None:
    result = turned(made()) if slow else made()
    (verdict,), (request,) = verdicts(result, "memory"), verdicts(result, "request")
    assert verdict.ratios == request.ratios and verdict.slower is request.worse is slow
    assert not verdict.worse
    times = request.line().removeprefix("objective request: ").replace("WORSE", "slower")
    assert verdict.line() == f"objective memory: in the artifact's report; requests {times}"


def test_a_round_without_any_answer_is_worse_in_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchResult, "ratios", lambda *_: [0.0, 0.5])
    (verdict,) = verdicts(made(), "throughput")
    assert verdict.worse and verdict.line() == "objective throughput: 2.00 to inf of b: WORSE"

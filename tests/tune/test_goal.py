"""The cost of a run is at most 1 exactly where the objective holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.metrics import percentile
from optkit.bench.records import Chunk, RequestRecord
from optkit.bench.slo import parse_slo
from optkit.errors import UserError
from optkit.tune import goal


def record(ttft: float = 0.5, gap: float = 0.05, tokens: int = 3, index: int = 0) -> RequestRecord:
    chunks = [Chunk(ttft + gap * n, 1) for n in range(tokens)]
    return RequestRecord(index, 0.0, chunks=chunks, done=chunks[-1].time, prompt_tokens=7)


def failed() -> RequestRecord:
    return RequestRecord(0, 0.0, error="no")


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=40), st.sampled_from([50, 95, 99]))
def test_the_cost_of_a_percentile_is_the_percentile_over_the_bound(times: list[float], q: int) -> None:
    found = goal.cost(parse_slo(f"ttft_p{q}<700ms"), [record(ttft) for ttft in times])
    assert found == pytest.approx(percentile(times, q) / 0.7)


def test_the_worst_term_counts_and_a_lower_bound_is_inverted() -> None:
    records = [record() for _ in range(4)]
    assert goal.cost(parse_slo("ttft_p50<1s,tpot_mean<25ms"), records) == pytest.approx(2.0)
    # 4 requests with 3 tokens each in 0.6 s
    assert goal.cost(parse_slo("throughput>=40"), records) == pytest.approx(2.0)
    assert goal.cost(parse_slo("request_throughput>=3.3333333"), records) == pytest.approx(0.5)
    assert goal.cost(parse_slo("ttft<1s"), []) == math.inf


def test_a_share_of_requests_is_joint() -> None:
    late, slow = record(ttft=0.8), record(gap=0.06)
    slo = parse_slo("95%:ttft<700ms,tpot<55ms")
    assert goal.request_cost(slo, late) == pytest.approx(8 / 7)
    assert goal.request_cost(slo, slow) == pytest.approx(60 / 55)
    assert goal.cost(slo, [record()] * 50 + [late, slow]) <= 1
    assert goal.is_held(slo, [record()] * 58 + [late]) == [f"{slo}: 1 of 59 requests miss it"]
    assert goal.is_held(slo, [record()] * 59) == []


def test_a_failed_request_is_infinitely_late() -> None:
    assert goal.cost(parse_slo("ttft_p50<1s"), [record(), failed(), failed()]) == math.inf
    assert goal.is_held(parse_slo("ttft<1s"), [record()] * 58 + [failed()]) != []
    assert goal.is_held(parse_slo("ttft<1s"), [record()] * 92 + [failed()]) == []


def test_a_percentile_is_shown_by_enough_requests_and_a_mean_by_its_interval() -> None:
    slo = parse_slo("ttft_p95<700ms")
    assert goal.is_held(slo, [record()] * 58) == ["ttft_p95<700ms: 0 of 58 requests miss it"]
    assert goal.is_held(slo, [record()] * 59) == []
    mean = parse_slo("tpot_mean<60ms")
    assert goal.is_held(mean, [record(gap=0.04), record(gap=0.05)] * 10) == []
    assert goal.is_held(mean, [record(gap=0.01), record(gap=0.1)] * 3) != []


def test_objectives_against_another_side_are_refused() -> None:
    with pytest.raises(UserError, match="compares two sides"):
        goal.check_goal(parse_slo("ttft_p50<=0.5x baseline"))


def test_values_are_described_with_units() -> None:
    slo = parse_slo("ttft_p95<700ms,throughput>1")
    assert goal.describe(slo, [record()]) == "ttft_p95 500 ms, output_throughput 5/s"
    assert goal.needed_share(slo) == 0.95
    assert goal.needed_share(parse_slo("90%:ttft<7")) == 0.9


@pytest.mark.parametrize("text", ["tpot:0.001", "itl_p95<1ms", "95%:ttft<700ms,tpot<1ms", "tpot_mean<1ms"])
def test_requests_without_a_sample_show_nothing(text: str) -> None:
    """An answer of one token has no time between tokens."""
    slo, records = parse_slo(text), [record(tokens=1, index=n) for n in range(400)]
    assert goal.cost(slo, records) == math.inf and len(goal.is_held(slo, records)) == 1
    assert not goal.is_held(parse_slo("95%:ttft<700ms"), records)

"""The one parser of objectives: every spelling, every refusal, and the text form reads back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.slo import LATENCIES, RATES, Load, Slo, Term, parse_slo
from optkit.errors import UserError


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft_p95<700ms@4rps", Slo((Term("ttft", "p95", "<", 700.0),), None, Load(rate=4.0))),
        ("ttft_p99.9 <= 1.5s", Slo((Term("ttft", "p99.9", "<=", 1500.0),))),
        ("ttft:700", Slo((Term("ttft", "p95", "<=", 700.0),))),
        (
            "ttft:700,tpot:50.5 e2el:9000",
            Slo(
                (
                    Term("ttft", "p95", "<=", 700.0),
                    Term("tpot", "p95", "<=", 50.5),
                    Term("e2e", "p95", "<=", 9000.0),
                )
            ),
        ),
        (
            "95%:ttft<700ms,tpot<50ms",
            Slo((Term("ttft", "", "<", 700.0), Term("tpot", "", "<", 50.0)), 0.95),
        ),
        ("ttft_p50 <= 0.5x baseline", Slo((Term("ttft", "p50", "<=", 0.5, "baseline"),))),
        ("ttft_p50 <= 0.5x", Slo((Term("ttft", "p50", "<=", 0.5, ""),))),
        ("tpot_mean<20", Slo((Term("tpot", "mean", "<", 20.0),))),
        (
            "throughput>=100tok/s@8clients",
            Slo((Term("output_throughput", "", ">=", 100.0),), None, Load(clients=8)),
        ),
        (
            "request_throughput > 1.1x other/side",
            Slo((Term("request_throughput", "", ">", 1.1, "other/side"),)),
        ),
        ("ttft≤800us @ 0.5 req/s", Slo((Term("ttft", "p95", "<=", 0.8),), None, Load(rate=0.5))),
    ],
)
def test_every_form_is_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no bound in it"),
        ("95%:", "no bound in it"),
        ("tft<700", "unknown metric: tft"),
        ("ttft", "'ttft' is no bound"),
        ("ttft<", "no number after the sign"),
        ("ttft:x", "no number after the sign"),
        ("ttft:nan", "no number"),
        ("ttft:inf", "no number"),
        ("ttft<1e999", "not a positive number"),
        ("ttft:-1", "not a positive number: -1"),
        ("ttft:0", "not a positive number: 0"),
        ("ttft_p100<700", "'p100' is no statistic of ttft"),
        ("ttft_p0<700", "'p0' is no statistic of ttft"),
        ("throughput_p95>7", "'p95' is no statistic of output_throughput"),
        ("ttft<700parsecs", "is no unit"),
        ("ttft<700tok/s", "ttft is a time"),
        ("throughput>5ms", "output_throughput is a rate"),
        ("throughput:5", "needs >= or <="),
        ("95%:ttft_p50<7", "plain upper bounds"),
        ("95%:throughput>7", "plain upper bounds"),
        ("95%:ttft>7", "plain upper bounds"),
        ("101%:ttft<7", "101 % is no share"),
        ("ttft<700,ttft<800", "the same metric twice"),
        ("ttft<700@", "is no load"),
        ("ttft<700@fast", "'fast' is no load"),
        ("ttft<700@0rps", "is no load"),
        ("ttft<700@2.5clients", "2.5 is no number of clients"),
        ("ttft<700 " * 200, "characters, of at most"),
    ],
)
def test_a_wrong_text_is_a_user_error_with_a_remedy(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_slo(text, "--assert")
    assert message in error.value.line()
    assert "--assert" in error.value.line() and error.value.fix
    assert "\n" not in error.value.line()


numbers = st.floats(1e-3, 1e6, allow_nan=False).map(lambda value: float(f"{value:g}"))
operators = st.sampled_from(["<", "<=", ">", ">="])
latency_terms = st.builds(
    Term, st.sampled_from(LATENCIES), st.sampled_from(["p50", "p95", "p99.5", "mean"]), operators, numbers
)
rate_terms = st.builds(Term, st.sampled_from(RATES), st.just(""), operators, numbers)
relative = st.builds(
    Term, st.sampled_from(LATENCIES), st.just("p50"), operators, numbers, st.sampled_from(["baseline", ""])
)
loads = st.one_of(st.none(), st.builds(Load, rate=numbers), st.builds(Load, clients=st.integers(1, 10_000)))


def _distinct(terms: list[Term]) -> bool:
    return len({(term.metric, term.statistic, term.is_upper) for term in terms}) == len(terms)


@given(
    st.lists(st.one_of(latency_terms, rate_terms, relative), min_size=1, max_size=4).filter(_distinct), loads
)
def test_the_text_of_an_objective_reads_back_to_the_objective(terms: list[Term], load: Load | None) -> None:
    slo = Slo(tuple(terms), None, load)
    assert parse_slo(str(slo)) == slo


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert parse_slo(text).terms
    except UserError as error:
        assert error.fix


def test_a_bound_is_met_by_its_own_sign_and_never_by_nan() -> None:
    below, relative_ = Term("ttft", "p95", "<", 700.0), Term("ttft", "p50", "<=", 0.5, "baseline")
    assert below.met(699.9) and not below.met(700.0) and not below.met(math.nan)
    assert relative_.met(50.0, other=100.0) and not relative_.met(50.1, other=100.0)
    assert Term("output_throughput", "", ">=", 10.0).met(10.0)
    with pytest.raises(ValueError, match="needs the value of baseline"):
        relative_.met(1.0)
    assert (below.percentile, Term("ttft", "mean", "<", 1.0).percentile) == (95.0, None)

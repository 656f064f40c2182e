"""Claims: held, failed or not shown, at the sample sizes of exact order statistics."""

from __future__ import annotations

import pytest

from optkit.bench.assertions import Checked, Claim, parse, parse_all
from optkit.errors import UserError
from tests.support.rounds import broken, record, result_of


def one(text: str) -> Claim:
    """The only claim of a text."""
    (claim,) = parse(text)
    return claim


def checked(text: str, requests: int, late: int = 0, failed: int = 0, rounds: int = 1) -> Checked:
    """A claim on requests with a TTFT of 500 ms, of which ``late`` take 900 ms and ``failed`` fail."""
    made = result_of(rounds, requests, lambda side, r, i: 0.9 if i < late else 0.5, sides=("a",))
    for turn in made.turns:
        turn.records[requests - failed :] = [broken(i) for i in range(requests - failed, requests)]
    return one(text).check(made)


@pytest.mark.parametrize("text", ["ttft_p95<700ms", "ttft_p95 <= 0.7 s", "95%:ttft<700ms,tpot<150ms"])
@pytest.mark.parametrize(
    ("requests", "late", "failed", "outcome"),
    [
        (58, 0, 0, "not shown"),
        (59, 0, 0, "held"),
        (92, 1, 0, "not shown"),
        (93, 1, 0, "held"),
        (93, 0, 1, "held"),
        (124, 1, 1, "held"),
        (124, 2, 1, "not shown"),
        (124, 30, 0, "failed"),
    ],
)
def test_a_percentile_and_a_share_need_their_sample_size(
    text: str, requests: int, late: int, failed: int, outcome: str
) -> None:
    assert checked(text, requests, late, failed).outcome == outcome


def test_a_share_needs_all_bounds_at_once() -> None:
    assert checked("95%:ttft<700ms,tpot<99ms", 124).outcome == "failed"
    assert "0 of 59 requests miss, 0 may" in checked("95%:ttft<700ms,tpot<150ms", 59).detail
    assert checked("99%:ttft<700ms", 298).line() == (
        "not shown: 99%:ttft<700ms: 299 requests needed, 298 measured"
    )


def test_lines_say_the_bound_that_is_shown() -> None:
    assert checked("ttft_p95<700ms", 59).line() == (
        "held: ttft_p95<700ms: below 500 ms with 95 % confidence (59 requests)"
    )
    assert checked("ttft_p95<700ms", 124, late=30).detail.startswith("above 900 ms")
    assert checked("ttft_p50>400ms", 20).outcome == "held"
    assert checked("ttft_p50>600ms", 20).outcome == "failed"


def test_a_round_without_a_value_is_named() -> None:
    made = result_of(6, 5, lambda side, r, i: 0.5, sides=("a",))
    made.turns[3].records[:] = [
        record(i, 0.5, tokens=1) for i in range(5)
    ]  # a token has no time per further token
    found = one("tpot_mean<700ms").check(made)
    assert found.outcome == "not shown" and found.detail == "round 4 has no value of tpot_mean"


def test_rates_and_means_need_rounds() -> None:
    assert checked("output_throughput>0.1", 5, rounds=5).outcome == "not shown"
    assert checked("output_throughput>0.1 tok/s", 5, rounds=6).outcome == "held"
    assert checked("output_throughput>100", 5, rounds=6).outcome == "failed"
    assert checked("ttft_mean<700ms", 5, rounds=6).outcome == "held"


@pytest.mark.parametrize(
    ("factors", "outcome"),
    [
        ((0.4,) * 6, "held"),
        ((0.4, 0.45, 0.4, 0.4, 0.4, 0.6), "not shown"),
        ((0.6,) * 6, "failed"),
        ((0.4,) * 5, "not shown"),
    ],
)
def test_a_ratio_is_held_by_its_whole_interval(factors: tuple[float, ...], outcome: str) -> None:
    made = result_of(
        len(factors), 3, lambda side, r, i: factors[r] * (i + 1) if side == "a" else 1.0 * (i + 1)
    )
    assert one("ttft_p50 <= 0.5x baseline").check(made).outcome == outcome
    assert one("ttft_p50 <= 0.5x b").check(made).outcome == outcome


def test_a_ratio_with_failed_requests_is_not_shown() -> None:
    made = result_of(6, 3, lambda side, r, i: 0.1 if side == "a" else 1.0)
    made.turns[0].records[0] = broken(0)
    assert one("ttft_p50<=0.5x b").check(made).outcome == "not shown"


def test_throughput_can_be_compared_as_well() -> None:
    made = result_of(6, 3, lambda side, r, i: 0.1, sides=("a", "b"))
    for turn in made.turns:
        if turn.side == "b":
            turn.records[:] = [record(i, 0.1, tpot=2.0, send=r.send) for i, r in enumerate(turn.records)]
    assert one("output_throughput >= 1.05x b").check(made).outcome == "held"


@pytest.mark.parametrize(
    "text",
    [
        "", "ttft", "ttft_p95=700", "ttft_p95<fast", "tftt_p95<700ms", "ttft_p95<30tok/s",
        "output_throughput>3ms", "95%:", "95%:ttft", "95%:itl<3", "0%:ttft<3", "100%:ttft<3", "ttft_p50<=x b",
        "95%:ttft<0.5x b", "ttft<700ms@4rps", "ttft_p50<=0.5xb", "made_up_p95<3", "ttft_p95<-3ms",
    ],
)  # fmt: skip
def test_what_is_no_claim_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


def test_claims_are_written_as_objectives_everywhere() -> None:
    """The forms of ``optkit tune --slo`` and ``optkit bench --slo``, with their defaults."""
    assert checked("ttft<700", 59).outcome == checked("ttft:700", 59).outcome == "held"
    assert checked("ttft:700", 58).detail.startswith("59 requests needed")
    assert one("throughput >= 3").of.name == "output_throughput" and one("e2el:9000").of.name == "e2e_p95"
    assert one("itl_p50<3").of.name == "itl_mean_p50" and one("e2e_mean<3s").bound == 3000
    assert [claim.text for claim in parse("ttft:700,tpot:50")] == ["ttft_p95<=700ms", "tpot_p95<=50ms"]
    two = parse("ttft_p50<0.5x tpot_p50<=1x old")
    assert [(claim.side, claim.factor) for claim in two] == [("", 0.5), ("old", 1.0)]


def test_sides_of_claims_are_checked_before_the_run() -> None:
    assert len(parse_all(["ttft_p50<1x old", "ttft_p50<1x"], ["new", "old"])) == 2
    for sides in (["new"], ["new", "x", "y"]):
        with pytest.raises(UserError, match="no side"):
            parse_all(["ttft_p50<1x baseline"], sides)
    assert parse_all(["ttft_p50<1x baseline"], ["new", "baseline", "transformers"])


def test_a_mean_of_the_answered_requests_says_nothing_where_some_failed() -> None:
    """A server that refuses three of four requests is fast for the fourth."""
    assert checked("ttft_mean<700ms", 4, rounds=6).outcome == "held"
    assert checked("ttft_mean<700ms", 4, failed=3, rounds=6).line() == (
        "not shown: ttft_mean<700ms: 18 requests of a failed"
    )
    assert (
        checked("output_throughput>=0.01", 4, failed=1, rounds=6).outcome == "held"
    )  # failures lower a rate


@pytest.mark.parametrize(
    ("text", "requests", "rounds"),
    [
        ("ttft_p95<700ms", 59, 1),
        ("ttft_p99<700ms", 299, 1),
        ("95%:ttft<700ms", 59, 1),
        ("ttft_mean<700ms", 1, 6),
        ("output_throughput>=1", 1, 6),
    ],
)
def test_a_claim_knows_what_it_needs(text: str, requests: int, rounds: int) -> None:
    claim = one(text)
    assert (
        claim.too_few(requests, rounds) is None
        and checked(text, requests, rounds=rounds).outcome != "not shown"
    )
    fewer = (requests - 1, rounds) if requests > 1 else (100, rounds - 1)
    assert (
        claim.too_few(*fewer) is not None and checked(text, fewer[0], rounds=fewer[1]).outcome == "not shown"
    )


@pytest.mark.parametrize(("tokens", "outcome"), [(1, "not shown"), (2, "held")])
def test_bounds_without_a_sample_are_not_shown(tokens: int, outcome: str) -> None:
    """An answer of one token has no TPOT, so no number of them shows a bound on it."""
    made = result_of(1, 60, lambda side, r, i: 0.5, sides=("a",))
    made.turns[0].records[:] = [record(i, 0.5, tokens=tokens) for i in range(60)]
    found = one("95%:ttft<700ms,tpot<150ms").check(made)
    assert found.outcome == outcome
    if tokens == 1:
        assert found.detail == "59 requests with TPOT needed, 0 measured"
    assert one("95%:ttft<700ms").check(made).outcome == "held"


@pytest.mark.parametrize("text", ["request_throughput>=1.5x b", "output_throughput>=0.1x", "ttft_p50<=2x b"])
def test_a_side_that_refuses_requests_is_not_slower(text: str) -> None:
    made = result_of(6, 4, lambda side, r, i: 0.5)
    for turn in made.turns:
        if turn.side == "b":
            turn.records[2:] = [broken(i) for i in (2, 3)]
    found = one(text).check(made)
    assert found.outcome == "not shown" and found.detail == "12 requests of b failed"

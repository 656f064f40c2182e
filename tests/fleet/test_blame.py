"""The ledger finds the request behind the deaths, and holds two deaths against a request at most."""

from __future__ import annotations

import pytest

from optkit.fleet.blame import REST_SECONDS, Ledger, Verdict
from optkit.serve.quarantine import BLOCK_SECONDS

A, B, C = b"a", b"b", b"c"


def died(
    ledger: Ledger,
    replica: str,
    request_id: str,
    name: bytes,
    num_tokens: int,
    num_deaths: int,
    now: float,
    since: float | None = None,
) -> Verdict:
    """The verdict on a request that was sent a quarter of a second before."""
    return ledger.died(
        *(replica, request_id, name),
        since=now - 0.25 if since is None else since,
        num_tokens=num_tokens,
        num_deaths=num_deaths,
        now=now,
    )


def test_died_makes_suspects_of_all_when_the_cause_is_unknown() -> None:
    ledger = Ledger()
    assert ledger.is_empty
    for name in (A, B):
        assert died(ledger, "r1", name.decode(), name, 5, 0, now=1.0) is Verdict.MOVE
        assert ledger.is_suspect(name)
    assert not ledger.is_empty and ledger.is_unexplained("r1")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_died_blames_the_suspect_on_board_alone_whichever_stream_reports_first(order: str) -> None:
    ledger = Ledger()
    died(ledger, "r1", "a", A, 5, 0, now=1.0)
    ledger.begin("r2", "a", A)
    verdicts = {}
    for request_id in order:
        verdicts[request_id] = died(ledger, "r2", request_id, request_id.encode(), 5, 1, now=9.0)
        ledger.end("r2", request_id)
    assert verdicts == {"a": Verdict.GUILTY, "b": Verdict.MOVE}
    assert ledger.is_blocked(A, 9.0) and not ledger.is_suspect(A)
    assert ledger.is_suspect(B) and not ledger.is_blocked(B, 9.0)


def test_died_ends_a_request_when_a_second_death_is_unexplained() -> None:
    ledger = Ledger()
    assert died(ledger, "r1", "a", A, 5, 1, now=1.0) is Verdict.UNLUCKY


def test_deaths_are_apart_when_a_request_came_after_the_first() -> None:
    ledger = Ledger()
    died(ledger, "r1", "b", B, 5, 0, now=1.0)
    ledger.begin("r1", "a", A)
    assert died(ledger, "r1", "c", C, 5, 0, now=1.2, since=0.5) is Verdict.MOVE
    assert died(ledger, "r1", "a", A, 5, 0, now=1.4, since=1.3) is Verdict.GUILTY


def test_passed_clears_a_suspect_when_it_has_more_tokens_than_at_the_death_or_has_ended() -> None:
    ledger = Ledger()
    for name in (A, B):
        died(ledger, "r1", name.decode(), name, 5, 0, now=1.0)
    ledger.begin("r2", "a", A)
    assert not ledger.passed("r2", "a", 5) and ledger.is_suspect(A) and ledger.probing == {"r2"}
    assert ledger.passed("r2", "a", 6) and not ledger.is_suspect(A) and not ledger.probing
    ledger.begin("r2", "b", B)
    assert ledger.passed("r2", "b", 0, is_over=True) and ledger.is_empty
    assert not ledger.passed("r2", "c", 100)


def test_begin_is_refused_when_another_suspect_is_there() -> None:
    ledger = Ledger()
    ledger.begin("r1", "a", A)
    with pytest.raises(ValueError, match="already"):
        ledger.begin("r1", "b", B)
    ledger.end("r1", "b")
    assert ledger.probing == {"r1"}, "only its own request ends a probation"
    ledger.end("r1", "a")
    assert not ledger.probing


def test_blocks_and_rests_end_when_their_time_has_passed() -> None:
    ledger = Ledger()
    ledger.block(A, 1.0)
    ledger.rest("r1", 1.0)
    assert ledger.resting(1.0) == {"r1"} and not ledger.resting(1.0 + REST_SECONDS)
    died(ledger, "r1", "b", B, 5, 0, now=2.0)
    assert ledger.is_blocked(A, BLOCK_SECONDS) and not ledger.is_blocked(A, 1.0 + BLOCK_SECONDS)
    ledger.forget(1.0 + BLOCK_SECONDS)
    assert not ledger.is_empty and ledger.is_suspect(B)
    ledger.forget(2.0 + BLOCK_SECONDS)
    assert ledger.is_empty


def test_a_death_while_it_computed_a_prompt_for_another_counts_for_the_request() -> None:
    ledger = Ledger()
    ledger.source_died("d", "a", A, now=1.0)
    ledger.source_died("d", "b", B, now=1.0)
    assert ledger.is_suspect(A) and not ledger.is_suspect(B), "one suspect at a time"
    assert died(ledger, "d", "b", B, 0, 0, now=2.0) is Verdict.MOVE
    assert died(ledger, "d", "a", A, 0, 0, now=2.0) is Verdict.GUILTY, "the second engine"


def test_a_request_whose_prompt_is_computed_here_is_cleared() -> None:
    ledger = Ledger()
    ledger.source_died("d", "a", A, now=1.0)
    assert ledger.passed("d", "a", 1) and not ledger.is_suspect(A)

"""Accounts of looks for guesses: rests, and what an answer can lose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.sampling.looking import (
    CALL_SHARE,
    LEAST_SHARE,
    LONGEST_REST,
    MOST,
    RATE,
    START,
    Account,
    CallShare,
)


@given(st.lists(st.tuples(st.floats(0.05, 1.5), st.integers(0, 1)), min_size=1, max_size=60))
def test_an_answer_loses_at_most_the_start_the_rate_and_one_look(looks: list[tuple[float, int]]) -> None:
    """``looks`` are prices in plain steps and right guesses, taken whenever the account is not empty."""
    account, tokens, steps = Account(), 0, 0.0
    for price, right in looks:
        if account.is_empty:
            rest = account.rest
            assert 1 <= rest <= LONGEST_REST
            account.earn(RATE * rest)
            tokens, steps = tokens + rest, steps + rest
            continue
        account.earn(right)
        account.spend(price)
        tokens, steps = tokens + 1 + right, steps + 1 + price
        assert account.tokens <= MOST
    assert steps - tokens <= START + RATE * tokens + 1.5 + 1e-9


def test_a_rest_lasts_until_the_account_is_full_enough() -> None:
    account = Account()
    account.spend(START + 5 * RATE)
    assert account.is_empty and account.rest in (5, 6)
    account.earn(RATE * account.rest)
    assert not account.is_empty or account.tokens == pytest.approx(0.0, abs=1e-12)


def test_a_frozen_process_costs_a_few_tokens() -> None:
    account = Account()
    account.spend(1e6)
    assert account.rest == LONGEST_REST and account.tokens > -10


def test_the_share_of_a_step_in_a_call_follows_what_is_measured() -> None:
    measured = CallShare()
    assert measured.value == CALL_SHARE
    for _ in range(60):
        measured.observe(0.8)
    assert measured.value == pytest.approx(0.8, abs=0.01)
    measured.observe(100.0)  # a frozen process
    assert measured.value < 0.85
    for _ in range(60):
        measured.observe(0.0)
    assert measured.value == pytest.approx(LEAST_SHARE, abs=0.01)

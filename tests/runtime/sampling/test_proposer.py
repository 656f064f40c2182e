"""Guesses by n-grams, and how many of them are worth checking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.sampling.proposer import PROBE_STEPS, Lengths, NgramProposer
from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from tests.support.speculation import sequence


@pytest.mark.parametrize(
    ("ids", "count", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),  # the three last tokens were seen
        ([9, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),  # only the two last
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, (8,)),  # the latest occurrence
        ([5, 6, 5, 6], 5, (5, 6, 5, 6, 5)),  # a repetition goes on
        ([1, 2, 3, 4], 3, ()),
        ([1], 3, ()),
        ([1, 2, 1, 2], 0, ()),
    ],
)
def test_what_followed_before_is_guessed(ids: list[int], count: int, draft: tuple[int, ...]) -> None:
    assert NgramProposer().draft([sequence(ids)], [count]) == [draft]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 59), st.integers(1, 5))
def test_the_index_grows_with_its_sequence(ids: list[int], cut: int, count: int) -> None:
    proposer, request = NgramProposer(), sequence(ids[:cut])
    proposer.draft([request], [count])
    request.token_ids += ids[cut:]
    assert proposer.draft([request], [count]) == NgramProposer().draft([sequence(ids)], [count])


def lengths(per_token: float) -> Lengths:
    """On a machine where a step costs 10 ms and each token ``per_token`` s more."""
    cost = CostModel()
    for tokens in (1, 2, 4, 8) * 40:
        cost.observe(StepWork(tokens, tokens, 0.0), 10e-3 + per_token * tokens)
    return Lengths(cost, 8)


def test_right_guesses_make_drafts_grow_and_wrong_ones_end_them() -> None:
    chooser, request = lengths(1e-3), sequence([1, 2, 3])
    first = chooser.choose([request], 0.0)[0]
    assert 1 <= first < 8
    for _ in range(10):
        chooser.observe(request, 8, 8)
    assert chooser.choose([request], 0.0) == [8]
    for _ in range(40):
        chooser.observe(request, 1, 0)
    quiet = [chooser.choose([request], 0.0)[0] for _ in range(2 * PROBE_STEPS)]
    assert sorted(set(quiet)) == [0, 1] and sum(quiet) == 2  # but now and then it tries again


def test_where_a_token_costs_as_much_as_a_step_nothing_is_guessed() -> None:
    cheap, dear = lengths(1e-3), lengths(50e-3)
    assert cheap.choose([sequence([1])], 0.0)[0] > 0
    assert dear.choose([sequence([1])], 0.0) == [0]
    assert cheap.choose([sequence([1])], 50e-3) == [0]  # the guess itself is dear


def test_a_full_batch_gains_less_from_a_guess() -> None:
    chooser = lengths(3e-3)
    alone = chooser.choose([sequence([1])], 0.0)[0]
    crowd = [sequence([1]) for _ in range(16)]
    assert max(chooser.choose(crowd, 0.0)) <= alone

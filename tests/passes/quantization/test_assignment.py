"""The knapsack: against trying everything, on small problems."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.passes.quantization.assignment import Choice, assign, lower_hull

CHOICE = st.builds(
    lambda loss, size: Choice(loss, size, size), st.floats(0, 1), st.integers(1, 40).map(float)
)
SITES = st.lists(st.lists(CHOICE, min_size=1, max_size=3), min_size=1, max_size=5)


def totals(sites: list[list[Choice]], chosen: list[int]) -> tuple[float, float]:
    picked = [choices[i] for choices, i in zip(sites, chosen, strict=True)]
    return sum(c.size for c in picked), sum(c.loss for c in picked)


def best_loss(sites: list[list[Choice]], max_size: float) -> float:
    options = itertools.product(*(range(len(choices)) for choices in sites))
    fitting = (totals(sites, list(option)) for option in options)
    return min((loss for size, loss in fitting if size <= max_size), default=float("inf"))


@given(SITES, st.floats(1, 200))
def test_within_the_budget_and_near_the_best(sites: list[list[Choice]], budget: float) -> None:
    """The greedy answer is worse than the best by at most one upgrade that did not fit."""
    smallest = sum(min(c.size for c in choices) for choices in sites)
    if smallest > budget:
        with pytest.raises(ValueError, match="smallest"):
            assign(sites, max_size=budget)
        return
    size, loss = totals(sites, assign(sites, max_size=budget))
    assert size <= budget
    one_upgrade = max(max(c.loss for c in choices) - min(c.loss for c in choices) for choices in sites)
    assert loss <= best_loss(sites, budget) + one_upgrade + 1e-9


@given(SITES, st.floats(0, 3))
def test_the_loss_bound_is_met_or_refused(sites: list[list[Choice]], bound: float) -> None:
    least = sum(min(c.loss for c in choices) for choices in sites)
    if least > bound + 1e-9:
        with pytest.raises(ValueError, match="expected"):
            assign(sites, max_loss=bound)
    elif least < bound - 1e-9:
        assert totals(sites, assign(sites, max_loss=bound))[1] <= bound + 1e-9


def test_upgrades_go_where_a_byte_buys_most() -> None:
    cheap, dear = [Choice(0.5, 1, 1), Choice(0.0, 2, 2)], [Choice(0.6, 10, 10), Choice(0.0, 30, 30)]
    assert assign([cheap, dear], max_size=12) == [1, 0]
    assert assign([cheap, dear], max_size=31) == [1, 0]
    assert assign([cheap, dear], max_size=32) == [1, 1]


def test_what_remains_is_filled_with_smaller_upgrades() -> None:
    large, small = [Choice(1.0, 1, 1), Choice(0.0, 100, 100)], [Choice(0.001, 1, 1), Choice(0.0, 2, 2)]
    assert assign([large, small], max_size=10) == [0, 1]


def test_a_choice_that_costs_more_and_is_worse_is_never_taken() -> None:
    choices = [Choice(0.2, 4, 4), Choice(0.3, 8, 8), Choice(0.1, 16, 16)]
    assert lower_hull(choices) == [0, 2]
    assert assign([choices], max_size=100) == [2]


def test_the_price_ranks_and_the_size_is_bounded() -> None:
    slow, fast = [Choice(0.5, 1, 1), Choice(0.0, 2, 9)], [Choice(0.5, 1, 1), Choice(0.0, 2, 2)]
    assert assign([slow, fast], max_size=3) == [0, 1]

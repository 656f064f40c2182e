"""The verdicts of the comparison of rankings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.simulator.ranking import chance_of, is_right, judged, missed_ranking, noise, spread
from optkit.tune.settings import Setting


@pytest.mark.parametrize(
    ("measured", "right"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([3.0, 1.0, 2.0, 4.0, 5.0], True),
        ([1.0, 2.0, 4.0, 3.0, 5.0], False),
        ([1.0, 2.0, 3.1, 3.0, 5.0], True),  # as good as the third
        ([1.0, 2.0, math.inf, 3.0, 5.0], False),
        ([1.0, 2.0], True),
    ],
)
def test_a_ranking_is_right_where_its_top_three_are_among_the_three_best(
    measured: list[float], right: bool
) -> None:
    assert is_right(measured, 0.0) is right


def test_noise_is_what_the_machine_changes_between_repeats_of_the_same_arrivals_and_widens_the_tie() -> None:
    generator = np.random.default_rng(0)
    settings, arrivals = generator.normal(0, 1, (20, 1, 1)), generator.normal(0, 0.5, (20, 5, 1))
    clean = np.exp(
        settings + arrivals + generator.normal(0, 0.3, (5, 4))
    )  # a repeat is slower for all settings
    assert noise(clean.tolist()) == pytest.approx(0, abs=1e-12)
    one = (clean * np.exp(generator.normal(0, 0.1, (20, 5, 4)))).tolist()
    assert noise(one) == pytest.approx(0.1 / np.sqrt(4), rel=0.2)
    assert math.isnan(noise([[[1.0]], [[2.0]]]))
    assert not is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.02)
    assert is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.1) and not is_right([1.0, 2.0, 4.2, 3.0, 5.0], 0.1)


def test_chance_is_the_share_of_all_choices_of_three_that_would_be_right() -> None:
    generator = np.random.default_rng(0)
    measured = generator.uniform(1, 2, 20)
    drawn = [is_right(generator.permutation(measured).tolist(), 0.05) for _ in range(4000)]
    assert chance_of(measured.tolist(), 0.05) == pytest.approx(np.mean(drawn), abs=0.02)
    assert chance_of([1.0] * 20, 0.0) == 1
    assert chance_of(list(range(1, 21)), 0.0) == pytest.approx(1 / 1140)


def test_each_round_is_judged_by_its_own_costs_and_the_mean_of_its_repeats() -> None:
    simulated = [[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]]
    measured = [
        [[cost, 9 * cost]] * 2 for cost in (1.0, 2.0, 3.0, 4.0)
    ]  # the second repeat is slower for all
    found = judged(simulated, measured)
    assert found["noise"] == pytest.approx(0, abs=1e-12)
    assert found["right"] == [True, False]
    swapped = judged(simulated, [measured[1], measured[0], *measured[2:]])
    assert swapped["right"] == found["right"]
    begun = judged(simulated, [[[cost, cost]] for cost in (1.0, 2.0, 3.0, 4.0)])
    assert begun == {"noise": pytest.approx(0, abs=1e-12), "right": [True], "chance": [0.25]}


@pytest.mark.parametrize(
    ("right", "sigma", "chance", "missed"),
    [
        (5, 0.05, 0.1, 0),
        (4, 0.05, 0.1, 0),
        (3, 0.05, 0.1, 1),
        (5, 0.25, 0.1, 1),
        (5, math.nan, 0.1, 1),
        (5, 0.05, 0.5, 1),
        (0, 0.0, 0.0, 1),
    ],
)
def test_four_of_five_rankings_count_where_noise_and_chance_are_small(
    right: int, sigma: float, chance: float, missed: int
) -> None:
    found = {"right": [True] * right + [False] * (5 - right), "noise": sigma, "chance": [chance] * 5}
    assert len(missed_ranking(found)) == missed


def test_settings_are_spread_over_the_costs_and_not_over_their_number() -> None:
    costs = {Setting.of("r", {"places": n}): 1.0 + 0.001 * n for n in range(50)}
    costs |= {Setting.of("r", {"places": 100 + n}): cost for n, cost in enumerate((2.0, 4.0, 8.0))}
    found = [costs[setting] for setting in spread(costs, 4)]
    assert found == [1.0, 2.0, 4.0, 8.0]
    assert len(set(spread(costs, 20))) == 20
    infinite = {Setting.of("r", {"places": 200}): math.inf}
    assert spread(costs | infinite, 4) == spread(costs, 4)
    assert spread(costs, 99) == sorted(costs, key=lambda setting: costs[setting])

"""The verdicts of the comparison of rankings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.simulator.ranking import is_right, missed_ranking, noise, spread
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
    assert is_right(measured) is right


def test_noise_is_what_settings_and_rounds_do_not_explain_and_widens_the_tie() -> None:
    generator = np.random.default_rng(0)
    settings, rounds = generator.normal(0, 1, (20, 1)), generator.normal(0, 0.3, 5)
    clean = np.exp(settings + rounds)
    assert noise(clean.tolist()) == pytest.approx(0, abs=1e-12)
    assert noise((clean * np.exp(generator.normal(0, 0.1, (20, 5)))).tolist()) == pytest.approx(0.1, rel=0.2)
    assert noise([[1.0], [2.0]]) == 0
    assert not is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.02)
    assert is_right([1.0, 2.0, 3.6, 3.0, 5.0], 0.1) and not is_right([1.0, 2.0, 4.2, 3.0, 5.0], 0.1)


@pytest.mark.parametrize(
    ("right", "sigma", "missed"),
    [(5, 0.05, 0), (4, 0.05, 0), (3, 0.05, 1), (5, 0.25, 1), (5, math.nan, 1), (0, 0.0, 1)],
)
def test_four_of_five_rankings_count_where_the_noise_is_small(right: int, sigma: float, missed: int) -> None:
    found = {"right": [True] * right + [False] * (5 - right), "noise": sigma}
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

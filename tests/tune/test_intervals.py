"""Intervals against scipy-free second methods: tables of the literature, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optkit.tune.intervals import Ratio, paired_ratio, upper_mean


def test_paired_ratios_cover_the_truth_in_95_of_100_cases() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        drift = generator.lognormal(0, 0.5, 5)
        a, b = (drift * generator.lognormal(0, 0.05, 5) for _ in range(2))
        ratio = paired_ratio(list(0.9 * a), list(b))
        hits += ratio.low <= 0.9 <= ratio.high
    assert 0.93 <= hits / 2000 <= 0.97


def test_no_change_is_called_a_change_in_5_of_100_cases() -> None:
    generator = np.random.default_rng(1)
    alarms = 0
    for _ in range(2000):
        ratio = paired_ratio(*(list(generator.lognormal(0, 0.1, 4)) for _ in range(2)))
        alarms += ratio.is_less or ratio.is_more
    assert 0.03 <= alarms / 2000 <= 0.07


def test_few_rounds_and_failures_decide_nothing_by_themselves() -> None:
    assert paired_ratio([0.5], [1.0]) == Ratio(0.5, 0.0, math.inf)
    assert not paired_ratio([math.inf] * 2, [1.0] * 2).is_more
    assert paired_ratio([math.inf] * 3, [1.0] * 3).is_more
    assert not paired_ratio([1.0] * 3, [math.inf] * 3).is_less
    for sides in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="rounds"):
            paired_ratio(*sides)


def test_the_upper_mean_is_students() -> None:
    assert upper_mean([1.0, 2.0, 3.0]) == pytest.approx(2 + 4.303 / math.sqrt(3))
    assert upper_mean([1.0]) == math.inf

"""Intervals, percentile bounds and trends, against brute force, exact fractions and simulated queues."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench import statistics
from optkit.bench.statistics import (
    is_shown,
    mean_interval,
    misses_allowed,
    percentile_bounds,
    queue_trend,
    ratio_interval,
    rounds_needed,
    samples_needed,
    trend,
    unstable,
)


@pytest.mark.parametrize(
    ("q", "misses", "count"), [(95, 0, 59), (95, 1, 93), (95, 2, 124), (99, 0, 299), (99, 1, 473), (50, 0, 5)]
)
def test_samples_needed_are_the_published_numbers(q: float, misses: int, count: int) -> None:
    assert samples_needed(q, misses) == count
    assert misses_allowed(count, q) == misses
    assert misses_allowed(count - 1, q) == (misses - 1 if misses else None)
    assert is_shown(count, misses, q)
    assert not is_shown(count - 1, misses, q)


def test_a_percentile_that_does_not_hold_is_rarely_shown() -> None:
    """With a true share just below the bound, at most 5 % of samples of 59 show it."""
    misses = np.random.default_rng(0).binomial(59, 0.0501, 20_000)
    assert np.mean([is_shown(59, int(count), 95) for count in misses]) <= 0.05


@given(st.integers(1, 150), st.sampled_from([50, 90, 95, 99]))
def test_misses_allowed_is_exact(count: int, q: int) -> None:
    p = Fraction(100 - q, 100)
    tail, most = Fraction(0), -1
    for k in range(count):
        tail += math.comb(count, k) * p**k * (1 - p) ** (count - k)
        if tail > Fraction(5, 100):
            break
        most = k
    assert misses_allowed(count, q) == (most if most >= 0 else None)


def test_percentile_bounds_are_order_statistics() -> None:
    values = [float(x) for x in range(100, 0, -1)]
    bounds = percentile_bounds(values, 95)
    assert bounds.high == 99.0  # one miss of 100
    assert bounds.low is not None and bounds.low < 95
    assert percentile_bounds(values, 95, failed=1).high == 100.0
    assert percentile_bounds(values, 95, failed=2).high == math.inf
    few = percentile_bounds(values[:58], 95)
    assert few.high is None and few.missing == 1
    assert percentile_bounds([], 95).missing == 59


def test_percentile_bounds_cover_the_true_percentile_as_often_as_promised() -> None:
    generator = np.random.default_rng(2)
    true = -math.log(0.05)  # the p95 of an exponential variable
    rounds = [percentile_bounds(generator.exponential(size=124).tolist(), 95) for _ in range(1000)]
    below = sum(found.high is not None and found.high < true for found in rounds)
    above = sum(found.low is not None and found.low > true for found in rounds)
    assert 20 <= below <= 65 and above <= 65


def test_mean_interval_is_made_of_subset_means() -> None:
    values = [0.3, -0.1, 0.2, 0.5, 0.1, 0.4, 0.0]
    means = sorted(
        sum(chosen) / len(chosen) for n in range(1, 8) for chosen in itertools.combinations(values, n)
    )
    found = mean_interval(values)
    assert found is not None and found.count == 7
    assert (found.low, found.high) == pytest.approx((means[2], means[-3]))  # 0.025 of 128 is 3.2
    assert found.low < found.estimate < found.high and found.estimate == pytest.approx(0.2)


def test_mean_interval_needs_six_rounds() -> None:
    assert (rounds_needed(), rounds_needed(0.85), rounds_needed(0.75)) == (6, 4, 3)
    assert mean_interval([0.1] * 5) is None
    six = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert six is not None and (six.low, six.high) == (1.0, 6.0)
    assert mean_interval([1.0] * 5 + [math.inf]) is None


@pytest.mark.parametrize("rounds", [8, 10, 16])
def test_mean_interval_misses_the_centre_as_often_as_promised(rounds: int) -> None:
    """Heavy tails: Student's t with two degrees of freedom."""
    generator = np.random.default_rng(rounds)
    draws = generator.standard_t(2, (600, rounds))
    alarms = sum(found.excludes(0) for row in draws if (found := mean_interval(row.tolist())))
    assert 0.03 <= alarms / 600 <= 0.08


def test_ratio_interval_pairs_by_prompt() -> None:
    short, long = {0: 1.0, 1: 10.0, 2: 100.0}, {0: 2.0, 1: 20.0, 2: 200.0, 3: 1.0}
    found = ratio_interval([(short, long)] * 6)
    assert found is not None and str(found) == "0.5 [0.5, 0.5]"
    assert ratio_interval([(short, long)] * 5) is None
    assert ratio_interval([(short, long)] * 6 + [({}, long)]) is None


def test_the_null_distribution_of_a_trend_is_that_of_all_orders() -> None:
    count = 6
    inversions = [
        sum(order[i] > order[j] for i, j in itertools.combinations(range(count), 2))
        for order in itertools.permutations(range(count))
    ]
    assert list(statistics._orders(count)) == [inversions.count(k) for k in range(16)]
    rising = trend([float(x) for x in range(12)], blocks=6)
    assert rising is not None and rising.rising == pytest.approx(1 / 720) and rising.falling == 1
    assert rising.grows() and not rising.falls() and rising.growth == pytest.approx(10)
    assert trend([1.0] * 30) is not None and not trend([1.0] * 30).grows()  # type: ignore[union-attr]
    assert trend([1.0] * 9) is None


def served(load: float, count: int, generator: np.random.Generator) -> list[tuple[float, float]]:
    """(arrival, end) of a queue with Poisson arrivals and a service time of 1."""
    free, spans = 0.0, []
    for at in generator.exponential(1 / load, count).cumsum():
        free = max(at, free) + 1.0
        spans.append((float(at), free))
    return spans


def test_a_queue_below_capacity_is_stable_and_above_is_not() -> None:
    generator = np.random.default_rng(5)
    below = [unstable(served(0.6, 100, generator)) for _ in range(100)]
    above = [unstable(served(1.4, 100, generator)) for _ in range(100)]
    assert sum(below) <= 8 and sum(above) >= 95


def test_queue_trend_counts_requests_that_never_end() -> None:
    spans = [(float(i), math.inf) for i in range(20)]
    found = queue_trend(spans)
    assert found is not None and found.growth > 10 and unstable(spans)
    assert queue_trend(spans[:8]) is None and not unstable(spans[:8])

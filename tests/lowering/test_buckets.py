"""Buckets: the dynamic program finds what trying everything finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.lowering.buckets import Bucket, choose_buckets

SIZES = st.sets(st.integers(1, 4096), min_size=1, max_size=7)
NUMBERS = st.integers(1, 1000).map(float)  # whole numbers: sums are exact in any order


@st.composite
def problems(draw):
    sizes = draw(SIZES)
    return {s: draw(NUMBERS) for s in sizes}, {s: draw(NUMBERS) for s in sizes}, draw(st.integers(1, 5))


def brute_force(weights, seconds, count):
    """The least cost over every choice of at most ``count`` sizes; each size runs in the smallest that holds it."""
    sizes = sorted(weights)
    costs = []
    for chosen in range(1, count + 1):
        for ends in itertools.combinations(sizes, chosen):
            if ends[-1] == sizes[-1]:
                costs.append(sum(w * seconds[min(e for e in ends if e >= s)] for s, w in weights.items()))
    return min(costs)


def expected_seconds(buckets, weights, seconds):
    """Weighted time of all sizes, each padded to the upper end of the bucket."""
    return sum(
        weight * next(seconds[b.last] for b in buckets if b.first <= size <= b.last)
        for size, weight in weights.items()
    )


@given(problems())
def test_it_is_as_good_as_trying_everything(problem):
    weights, seconds, count = problem
    buckets = choose_buckets(weights, seconds, count)
    assert expected_seconds(buckets, weights, seconds) == brute_force(weights, seconds, count)


@given(problems())
def test_every_size_is_served_once(problem):
    weights, seconds, count = problem
    buckets = choose_buckets(weights, seconds, count)
    assert 1 <= len(buckets) <= count
    assert list(buckets) == sorted(buckets)
    for size in weights:
        assert sum(bucket.first <= size <= bucket.last for bucket in buckets) == 1
    assert all({bucket.first, bucket.last} <= weights.keys() for bucket in buckets)


def test_frequent_sizes_are_not_padded():
    weights = {1: 640.0, 100: 1.0, 120: 1.0, 512: 10.0}
    seconds = {1: 1.0, 100: 20.0, 120: 22.0, 512: 90.0}
    assert choose_buckets(weights, seconds, 3) == (Bucket(1, 1), Bucket(100, 120), Bucket(512, 512))


def test_no_more_buckets_than_pay():
    assert choose_buckets({8: 1.0, 16: 1.0}, {8: 5.0, 16: 5.0}, 2) == (Bucket(8, 16),)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (5, 4), (-1, -1)])
def test_impossible_buckets_are_refused(first, last):
    with pytest.raises(ValueError, match="ascending"):
        Bucket(first, last)

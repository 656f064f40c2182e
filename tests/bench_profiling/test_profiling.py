"""The statistics of the overhead, and pairs in random order."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from bench.profiling import KERNELS, compared, in_pairs, ratio


def test_ratio_finds_an_overhead_behind_noise() -> None:
    draw = random.Random(5)
    pairs = [(1.02 * (plain := draw.uniform(8, 12)) * draw.gauss(1, 0.005), plain) for _ in range(100)]
    middle, low, high = ratio(pairs)
    assert low < 0.02 < high and middle == pytest.approx(0.02, abs=0.003) and high - low < 0.006


def test_each_pair_has_both_sides_in_either_order() -> None:
    sides = list(islice(in_pairs(), 200))
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    assert all(sorted(pair) == [False, True] for pair in pairs) and len(set(pairs)) == 2


def test_differences_beyond_the_bound_are_not_ok() -> None:
    assert compared("x", 1.04, 1.0, 0.5, 0.51)["ok"]
    assert not compared("x", 1.06, 1.0, 0.5, 0.51)["ok"] and not compared("x", 1.0, 1.0, 0.4, 0.5)["ok"]


@pytest.mark.parametrize(
    ("symbol", "is_product"),
    [
        ("optkit::linear_avx512(optkit::Linear const&, optkit::Panel const&, long, long)", True),
        ("void optkit::(anonymous namespace)::grouped_tile<4, true, false>(optkit::Linear const&)", True),
        ("void optkit::(anonymous namespace)::avx512::score_int8_tile<6, 4>(unsigned char const*)", False),
        ("optkit::rms_norm(float const*)", False),
        ("_PyEval_EvalFrameDefault", False),
    ],
)
def test_symbols_of_products(symbol: str, is_product: bool) -> None:
    assert bool(KERNELS.search(symbol)) is is_product

"""Recycled tokens against a sort of all, and what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from optkit.kernels.cpu import native
from optkit.runtime.sampling import recycling
from optkit.runtime.sampling.recycling import KEPT, RANGE, Recycled, likeliest


@pytest.fixture(params=[True, False], ids=["native", "numpy"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with native kernels and without."""
    if request.param and not native.available():
        pytest.skip("no native kernels")
    monkeypatch.setattr(native, "available", lambda: request.param)


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_likeliest_are_those_of_a_sort(spread: float) -> None:
    logits = np.random.default_rng(3).standard_normal((3, 5000), dtype=np.float32) * np.float32(spread)
    expected = []
    for row in logits[[2, 0]]:
        tokens = np.argsort(-row)[:KEPT]
        expected.append(tuple(tokens[row[tokens] > row[tokens[0]] - RANGE].tolist()))
    assert likeliest(logits, (2, 0)) == expected


def test_logits_that_are_no_numbers_give_nothing() -> None:
    assert likeliest(np.full((1, 8), np.nan, dtype=np.float32), (0,)) == [()]


def test_two_known_tokens_go_before_one() -> None:
    table = Recycled()
    table.add([1, 2, 3], (7,))
    table.add([5, 3], (8,))
    assert table.after((2, 3)) == (2, (7,))
    assert table.after((5, 3)) == (2, (8,))
    assert table.after((9, 3)) == (1, (8,))
    assert table.after((3, 9)) == (0, ())
    assert table.after((3,)) == (1, (8,))


def test_a_step_fills_the_table_for_each_right_row() -> None:
    logits = np.eye(6, dtype=np.float32)[[4, 0, 5]] * 100  # likeliest: 4, 0 and 5
    table = Recycled()
    table.collect([1, 2], (4, 5), likeliest(logits, (0, 2)))
    assert table.after((1, 2)) == (2, (4,))
    assert table.after((2, 4)) == (2, (5,))
    assert table.after((4, 5)) == (0, ())


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "ENTRIES", 4)
    table = Recycled()
    for token in range(10):
        table.add([token, token + 100], (1,))
    assert table.after((9, 109)) == (2, (1,))
    assert table.after((7, 107)) == (0, ())

"""Arithmetic of vectors, against numpy's plain formulas in double precision."""

from __future__ import annotations

import base64

import numpy as np

from optkit.serve.pooling.vectors import cosines, encoded, finished, joined

ROWS = np.random.default_rng(1).standard_normal((5, 12)).astype(np.float32)


def test_parts_are_joined_in_order() -> None:
    assert np.array_equal(joined([ROWS[:2].tobytes(), ROWS[2:].tobytes()], 12), ROWS)


def test_dimensions_are_cut_and_normalized_again() -> None:
    cut = ROWS[:, :7].astype(np.float64)
    expected = cut / np.sqrt((cut**2).sum(1))[:, None]
    np.testing.assert_allclose(finished(ROWS, 7, True), expected, rtol=1e-6)
    assert np.array_equal(finished(ROWS, 7, False), ROWS[:, :7])
    assert not finished(np.zeros((1, 3), np.float32), None, True).any()


def test_base64_holds_the_bytes_of_the_numbers() -> None:
    assert base64.b64decode(str(encoded(ROWS[0], True))) == ROWS[0].astype("<f4").tobytes()
    assert np.array_equal(np.array(encoded(ROWS[0], False), np.float32), ROWS[0])


def test_cosines_of_pairs_and_of_one_with_all() -> None:
    a, b = ROWS.astype(np.float64), ROWS[::-1].astype(np.float64)
    expected = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(cosines(ROWS, ROWS[::-1]), expected, atol=1e-6)
    alone = [a[0] @ y / np.linalg.norm(a[0]) / np.linalg.norm(y) for y in a]
    np.testing.assert_allclose(cosines(ROWS[:1], ROWS), alone, atol=1e-6)
    assert max(cosines(ROWS, ROWS)) <= 1.0

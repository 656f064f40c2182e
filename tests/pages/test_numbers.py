"""Numbers in few digits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.pages.numbers import milliseconds, number, share, size_text, tick


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (0.0, "0"),
        (183.4, "183"),
        (7.298, "7.3"),
        (0.00412, "0.00412"),
        (999.6, "1000"),
        (12345.6, "12,346"),
        (-2500.0, "-2,500"),
        (5.3e-08, "5.3e-08"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-4, 1e12))
def test_a_number_keeps_three_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [(96.25, "96.25"), (1000.0, "1,000"), (0.1 * 3, "0.3"), (0.0005, "0.0005"), (2e6, "2,000,000")],
)
def test_ticks_have_all_digits(value: float, text: str) -> None:
    assert tick(value) == text


def test_units() -> None:
    assert milliseconds(0.1834) == "183 ms" and milliseconds(None) == "-"
    assert size_text(143_025_536) == "143 MB" and size_text(12) == "12 bytes" and size_text(2.5e9) == "2.5 GB"
    assert share(0.973) == "97.3%" and share(None) == "-"

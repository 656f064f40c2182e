"""What makes the long evaluation an instrument."""

from __future__ import annotations

import pytest

from bench.long.evaluation import faults
from optkit.evaluation.long.score import LongReport
from optkit.evaluation.quality import Estimate


def report(loss: float | None) -> LongReport:
    value = None if loss is None else Estimate(loss, 0.0)
    return LongReport(1, 1, value, Estimate(0.0, 0.0), None, (), {}, {})


@pytest.mark.parametrize(
    ("same", "damaged", "ratio", "words"),
    [
        (0.0, 1.0, 0.01, None),
        (0.1, 1.0, 0.01, "differs from itself"),
        (0.0, 0.2, 0.01, "below 0.5"),
        (0.0, 1.0, 0.2, "logarithm of perplexity"),
        (None, None, 0.0, "no task"),
    ],
)
def test_faults(same: float | None, damaged: float | None, ratio: float, words: str | None) -> None:
    found = faults(report(same), report(damaged), ratio)
    assert found == [] if words is None else words in found[0]

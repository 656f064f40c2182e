"""Forecasts of the first token: refusal of requests that would miss their deadline."""

from __future__ import annotations

import numpy as np

from tests.support.timed_engine import SHORT, serve


def test_enforce_ttft_slo_refuses_early_and_keeps_the_bound_for_the_rest() -> None:
    flood = [(0.03 * i, SHORT) for i in range(300)]
    free = serve("slo", flood)
    kept = serve("slo", flood, enforce_ttft_slo=True)
    assert kept.refused > 50
    assert np.percentile(free.ttft[SHORT], 95) > 2.0
    assert np.percentile(kept.ttft[SHORT], 95) < 0.7 * 1.5

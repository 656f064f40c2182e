"""Searches over rates: arguments that are refused before a server is asked."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.api.rates import find_rate, sweep
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError

LOAD = WorkloadConfig(num_prompts=5, input_len=5, output_len=2)
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "under a promise"),
        ({"slo": {"ttft": 700.0}, "probes": 0}, "probes must be positive"),
        ({"slo": {"ttft": 700.0}, "start": 0.0}, "first rate must be positive and finite, not 0"),
        ({"slo": {"ttft": 700.0}, "start": -2.0}, "not -2"),
        ({"slo": {"ttft": 700.0}, "start": float("inf")}, "not inf"),
        ({"slo": {"ttft": 700.0}, "start": float("nan")}, "not nan"),
    ],
)
def test_a_search_that_can_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_rate(url=NOWHERE, load=LOAD, **options)


def test_a_sweep_without_a_round_is_refused() -> None:
    with pytest.raises(UserError, match="at least one round and one rate"):
        sweep(url=NOWHERE, load=LOAD, rounds=0)

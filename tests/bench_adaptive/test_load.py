"""Load in steps: the rates asked for, the same for the same seed, and prompts that share nothing."""

from __future__ import annotations

import math

import pytest

from bench.adaptive.load import MIXES, Mix, stepped


def test_each_rate_has_its_arrivals_and_a_seed_repeats_them() -> None:
    found = stepped([2.0, 20.0, 2.0], 100.0, seed=3)
    assert (
        found
        == sorted(found)
        == stepped([2.0, 20.0, 2.0], 100.0, seed=3)
        != stepped([2.0, 20.0, 2.0], 100.0, seed=4)
    )
    for start, expected in ((0, 200), (100, 2000), (200, 200)):
        count = sum(start <= at < start + 100 for at in found)
        assert abs(count - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_requests_of_a_mix_fit_the_context_and_share_no_prefix(mix: Mix) -> None:
    found = mix.requests([float(n) for n in range(200)], seed=1)
    assert [one.arrival for one in found] == [float(n) for n in range(200)]
    assert all(16 <= len(one.prompt_ids) <= 1900 and 1 < one.output_len <= 500 for one in found)
    assert len({one.prompt_ids[0] for one in found}) == len(found)
    assert found == mix.requests([float(n) for n in range(200)], seed=1)

"""Same seed, same requests; exact lengths; no shared prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.workload import WorkloadConfig, build
from optkit.errors import UserError

IDS = [int(x) for x in np.random.default_rng(0).integers(0, 3000, 20_000)]


@given(st.integers(1, 20), st.integers(1, 600), st.integers(0, 5), st.integers(0, 20))
def test_prompts_are_exact_distinct_and_reproducible(count, length, seed, round_):
    config = WorkloadConfig(num_prompts=count, input_len=length, seed=seed)
    one, two = build(config, IDS, round_), build(config, IDS, round_)
    assert one == two
    assert all(len(r.prompt_ids) == length and r.arrival == 0 for r in one.requests)
    leads = [r.prompt_ids[0] for r in one.requests]
    leads += [r.prompt_ids[0] for r in build(config, IDS, round_ + 1).requests]
    assert len(set(leads)) == 2 * count  # no two prompts of two rounds share even one token


def test_seeds_differ():
    assert build(WorkloadConfig(seed=0), IDS) != build(WorkloadConfig(seed=1), IDS)


def test_poisson_arrivals_start_at_zero_and_have_the_rate():
    config = WorkloadConfig(num_prompts=2000, input_len=4, request_rate=8.0, max_concurrency=None)
    arrivals = [r.arrival for r in build(config, IDS).requests]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert 2000 / arrivals[-1] == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"input_len": -1},
        {"output_len": 0},
        {"request_rate": 0.0},
        {"max_concurrency": 0},
        {"max_concurrency": None},
        {"input_len": 30_000},
        {"num_prompts": 4000},
    ],
)
def test_impossible_workloads_are_user_errors(wrong):
    with pytest.raises(UserError):
        build(WorkloadConfig(**wrong), IDS)

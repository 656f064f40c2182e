"""Same seed, same requests; exact lengths; no shared prefixes."""

import json

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
        {"burstiness": 0.5},
        {"burstiness": 0.0, "request_rate": 1.0},
        {"turns": 3},
        {"num_prefixes": 2},
        {"shared_prefix_len": -1},
        {"trace_scale": 0.5},
        {"seed": -1},
        {"trace": "x", "turns": 2},
        {"trace": "x", "shared_prefix_len": 2},
        {"trace": "x", "burstiness": 2.0, "request_rate": 1.0},
    ],
)
def test_impossible_workloads_are_user_errors(wrong):
    with pytest.raises(UserError):
        build(WorkloadConfig(**wrong), IDS)


def test_each_turn_of_a_conversation_begins_with_the_turn_before():
    config = WorkloadConfig(
        num_prompts=6, input_len=5, output_len=3, turns=3, shared_prefix_len=4, request_rate=3.0
    )
    requests = build(config, IDS).requests
    assert [len(r.prompt_ids) for r in requests] == [9, 17, 25] * 2
    assert [r.after for r in requests] == [None, 0, 1, None, 3, 4]
    for r in requests:
        if r.after is not None:
            before = requests[r.after].prompt_ids
            assert r.prompt_ids[: len(before)] == before and r.arrival == requests[r.after].arrival
    assert requests[0].prompt_ids[:4] == requests[3].prompt_ids[:4]
    assert requests[0].prompt_ids[4] != requests[3].prompt_ids[4]


def test_conversations_start_at_the_rate_of_requests_over_turns():
    config = WorkloadConfig(num_prompts=2000, input_len=2, output_len=1, turns=2, request_rate=8.0)
    assert 2000 / build(config, IDS).requests[-1].arrival == pytest.approx(8, rel=0.1)


def test_a_trace_brings_arrivals_lengths_and_prefixes(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [(0, 700, 64, [0, 1]), (500, 1000, 96, [0, 2]), (2000, 100, 1, [3])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    config = WorkloadConfig(num_prompts=3, max_concurrency=None, trace=str(file), trace_scale=1 / 32)
    requests = build(config, IDS).requests
    assert [r.arrival for r in requests] == [0, 0.5, 2]
    assert [len(r.prompt_ids) for r in requests] == [22, 31, 3]
    assert [r.output_len for r in requests] == [2, 3, 1]
    assert requests[0].prompt_ids[:16] == requests[1].prompt_ids[:16]
    assert requests[0].prompt_ids[16] != requests[1].prompt_ids[16]
    assert [r.arrival for r in build(config.at_rate(4.0), IDS).requests] == pytest.approx([0, 0.125, 0.5])
    assert build(config, IDS, 1).requests[0].prompt_ids[:16] != requests[0].prompt_ids[:16]

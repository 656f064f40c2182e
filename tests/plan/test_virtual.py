"""Requests on a virtual clock, against schedules by hand."""

from __future__ import annotations

import pytest

from optkit.plan.steps import Step
from optkit.plan.virtual import Arrival, clients, serve
from optkit.runtime.scheduling.config import SchedulerConfig

LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": 256,
}
CONFIG = SchedulerConfig(**LIMITS)
START, TOKEN = 1.0, 0.1  # seconds of a step, and of each token in it


def seconds(step: Step) -> float:
    return START + TOKEN * sum(point.tokens for point in step)


def test_a_request_alone() -> None:
    (found,) = serve(CONFIG, seconds, [Arrival(5.0, 20, 4)])
    assert found.ttft == pytest.approx(START + 20 * TOKEN)
    assert found.tpot == pytest.approx(START + TOKEN)
    assert found.end == pytest.approx(5.0 + START + 20 * TOKEN + 3 * (START + TOKEN))


def test_a_long_prompt_pays_a_start_for_each_chunk() -> None:
    (found,) = serve(CONFIG, seconds, [Arrival(0.0, 80, 1)])
    assert found.ttft == pytest.approx(3 * START + 80 * TOKEN)


def test_a_prompt_beside_a_stream_takes_what_the_stream_leaves() -> None:
    """Step 1 computes the first prompt; step 2 a token of it and 31 of the second prompt, which needs 9 more."""
    config = SchedulerConfig(**LIMITS, enable_prefix_caching=False)
    first, second = serve(config, seconds, [Arrival(0.0, 32, 8), Arrival(0.1, 40, 1)])
    assert first.ttft == pytest.approx(START + 32 * TOKEN)
    assert second.ttft == pytest.approx(first.ttft + 2 * START + (31 + 1 + 9 + 1) * TOKEN - 0.1)


def test_a_request_beyond_the_places_waits_for_an_end() -> None:
    config = SchedulerConfig(**LIMITS | {"max_num_seqs": 1})
    first, second = serve(config, seconds, [Arrival(0.0, 8, 4), Arrival(0.0, 8, 1)])
    assert second.ttft == pytest.approx(first.end + START + 8 * TOKEN)


def test_clients_count_all_tokens() -> None:
    found = clients(CONFIG, seconds, 4, 8, 5)
    assert found["output_tokens_per_second"] == pytest.approx(20 / found["seconds"])
    assert found["ttft_mean_seconds"] <= found["ttft_max_seconds"] < found["seconds"]

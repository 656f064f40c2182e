"""The simulator against queues computed by other means: formulas, and an event simulation written here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.bench.workload import BenchRequest
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.simulator import Overheads, capacity, simulate, simulate_rate
from optkit.simulation.step_costs import StepCosts

PER_TOKEN = StepCosts((0.0, 0.01, 0.01, 0.0, 0.0, 0.0))  # 10 ms a token


def config(**limits: object) -> SchedulerConfig:
    known = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "block_size": 16,
        "num_blocks": 4096,
        "prefill_target_tokens": 1,  # a prompt a step
    }
    return SchedulerConfig(**known | limits)


def requests(arrivals: list[float], prompt: int = 10, output: int = 1) -> list[BenchRequest]:
    return [
        BenchRequest(index, tuple(range(100 * index, 100 * index + prompt)), output, at)
        for index, at in enumerate(arrivals)
    ]


def ttfts(found: object) -> list[float]:
    return [r.first_token - r.send for r in found.records]


def test_one_request_takes_the_time_of_its_steps_and_the_overheads() -> None:
    costs = StepCosts((0.005, 0.001, 0.002, 0.003, 1e-4, 1e-3))
    found = simulate(
        config(), costs, requests([2.0], prompt=100, output=3), overheads=Overheads(0.5, 1e-3, 0.01, 0.02)
    )
    (record,) = found.records
    prefill = 0.005 + 64 * 0.001 + 36 * 0.002 + 0.003 + 1e-4 * 100 * 50 + 100 * 1e-3 + 0.01 + 0.02
    decodes = [0.005 + 0.001 + 0.003 + 1e-3 * context + 0.01 + 0.02 for context in (100, 101)]
    assert record.send == 2.0
    assert record.first_token == pytest.approx(2.0 + 0.5 + prefill)
    assert record.done == pytest.approx(record.first_token + sum(decodes))
    assert (record.tokens, record.prompt_tokens, record.error) == (3, 100, None)


def test_reading_a_request_delays_the_step_that_runs_meanwhile() -> None:
    """By hand: prompts of 100 tokens take 1 s; the second is read from 0.8 to 1.0 s, the third while nothing runs."""
    found = simulate(
        config(), PER_TOKEN, requests([0.0, 0.8, 5.0], prompt=100), overheads=Overheads(request=0.2)
    )
    assert [r.done for r in found.records] == pytest.approx([0.2 + 1.0 + 0.2, 1.4 + 1.0, 5.2 + 1.0])


def test_waiting_is_that_of_a_queue_with_poisson_arrivals_and_fixed_service() -> None:
    """M/D/1 at 60 % load: a mean wait of rho / (2 (1 - rho)) services (Pollaczek and Khinchine)."""
    service, load = 0.1, 0.6
    arrivals = np.random.default_rng(1).exponential(service / load, 6000).cumsum()
    found = simulate(config(max_num_seqs=1), PER_TOKEN, requests(list(arrivals)))
    waits = np.array(ttfts(found)) - service
    assert waits.mean() / service == pytest.approx(load / (2 * (1 - load)), rel=0.1)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=25), st.integers(1, 60), st.integers(1, 8))
def test_prompts_of_one_token_answers_are_served_one_by_one_as_by_hand(
    gaps: list[float], prompt: int, places: int
) -> None:
    arrivals = list(np.cumsum(gaps))
    found = simulate(config(max_num_seqs=places), PER_TOKEN, requests(arrivals, prompt))
    free, expected = 0.0, []
    for arrival in arrivals:
        free = max(free, arrival) + 0.01 * prompt
        expected.append(free - arrival)
    assert ttfts(found) == pytest.approx(expected)


def by_events(arrivals: list[float], prompt: int, output: int, places: int) -> list[tuple[float, float]]:
    """(first token, end) of each request, by an own loop over steps: decodes of all, and the first prompt in line."""
    now, waiting, running, times = 0.0, list(range(len(arrivals))), {}, {}
    while waiting or running:
        here = [i for i in waiting if arrivals[i] <= now]
        if not here and not running:
            now = arrivals[waiting[0]]
            continue
        new = here[:1] if len(running) < places else []
        now += 0.01 * (len(running) + prompt * len(new))
        for index in list(running):
            running[index] += 1
            if running[index] == output:
                times[index] = (times[index][0], now)
                del running[index]
        for index in new:
            waiting.remove(index)
            times[index] = (now, now)
            if output > 1:
                running[index] = 1
    return [times[i] for i in range(len(arrivals))]


@settings(max_examples=30)
@given(
    st.lists(st.floats(0, 0.5), min_size=1, max_size=15),
    st.integers(2, 40),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_continuous_batching_is_that_of_an_event_simulation(
    gaps: list[float], prompt: int, output: int, places: int
) -> None:
    arrivals = [float(at) for at in np.cumsum(gaps)]
    found = simulate(config(max_num_seqs=places), PER_TOKEN, requests(arrivals, prompt, output))
    expected = by_events(arrivals, prompt, output, places)
    assert [r.first_token for r in found.records] == pytest.approx([first for first, _ in expected])
    assert [r.done for r in found.records] == pytest.approx([end for _, end in expected])


def test_clients_without_pauses_send_when_an_answer_ends() -> None:
    found = simulate(config(), PER_TOKEN, requests([0.0] * 5), clients=2)
    assert [r.send for r in found.records] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])
    assert max(ttfts(found)) == pytest.approx(0.2)


def test_a_request_that_can_never_run_is_a_failed_record() -> None:
    found = simulate(config(max_model_len=8), PER_TOKEN, requests([0.0, 1.0], prompt=10))
    assert all("context" in str(record.error) for record in found.records)
    assert simulate(config(), PER_TOKEN, []).records == []


def test_little_kv_makes_requests_wait_and_the_queue_is_counted() -> None:
    many = requests([0.0] * 8, prompt=64, output=32)
    roomy = simulate(config(), PER_TOKEN, many)
    tight = simulate(config(num_blocks=8), PER_TOKEN, many)
    assert max(ttfts(tight)) > max(ttfts(roomy))
    assert tight.waiting > roomy.waiting > 0
    assert all(r.ok for r in tight.records)


def test_capacity_and_load_say_where_the_simulation_does_not_know() -> None:
    some = requests(list(np.random.default_rng(0).exponential(0.125, 200).cumsum()))
    assert capacity(config(), PER_TOKEN, some) == pytest.approx(10)
    assert simulate_rate(config(), PER_TOKEN, some, 8.0).known
    above = simulate_rate(config(), PER_TOKEN, some, 9.5)
    assert above.load == pytest.approx(0.95) and not above.known
    assert simulate(config(), PER_TOKEN, some, clients=4).known


def test_the_parts_of_the_slowest_requests_add_up_to_their_time() -> None:
    found = simulate(
        config(max_num_seqs=1), PER_TOKEN, requests([0.0] * 20), overheads=Overheads(request=0.02)
    )
    parts = found.binding(0.95)
    assert parts["queue"] == pytest.approx(1.9) and parts["prefill"] == pytest.approx(0.1)
    assert sum(parts.values()) == pytest.approx(2.02)
    assert max(parts, key=lambda name: parts[name]) == "queue"
    assert simulate(config(), PER_TOKEN, []).binding() == {}


def test_the_policy_slo_lets_short_prompts_overtake() -> None:
    mixed = [
        BenchRequest(0, tuple(range(400)), 1, 0.0),
        BenchRequest(1, tuple(range(1000, 1400)), 1, 0.01),
        BenchRequest(2, tuple(range(5000, 5010)), 1, 0.02),
    ]
    by_arrival = simulate(config(), PER_TOKEN, mixed)
    by_slack = simulate(config(scheduling_policy="slo", ttft_slo_ms=500.0), PER_TOKEN, mixed)
    assert ttfts(by_slack)[2] < ttfts(by_arrival)[2] / 2

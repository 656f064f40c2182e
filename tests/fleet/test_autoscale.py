"""Replicas are added when the promise is missed, removed when there is too little work, and left alone under noise."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.local_fleet import MockFleet
from optkit.fleet.autoscale import (
    AutoscaleConfig,
    Meter,
    ReplicaLoad,
    ScaleState,
    decide,
    metrics_of,
    needed,
    predicted_ttft_policy,
    quantile,
)
from optkit.fleet.mock import MockModel
from optkit.fleet.replica import Mark, ReplicaReport
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.types import EngineStats, FinishReason, FirstToken
from tests.fleet.test_failover import asked, run

CONFIG = AutoscaleConfig(ttft_seconds=1.0, max_replicas=6, down_seconds=60.0)
IDLE, HALF, LATE = (
    ReplicaLoad(),
    ReplicaLoad(utilization=0.5),
    ReplicaLoad(queue_seconds=3.0, utilization=1.0),
)


def after(loads: list[list[ReplicaLoad]], target: int, config: AutoscaleConfig = CONFIG) -> list[int]:
    """The targets after each tick, a second apart, with a state of its own."""
    state, targets = ScaleState(), []
    for now, tick in enumerate(loads):
        target, state = decide(config, state, tick, target, float(now))
        targets.append(target)
    return targets


def test_decide_adds_replicas_when_the_promise_is_missed_for_two_ticks() -> None:
    assert after([[HALF], [LATE], [HALF], [LATE], [LATE]], 1) == [1, 1, 1, 1, 2]


def test_decide_adds_what_the_backlog_needs_at_once() -> None:
    swamped = ReplicaLoad(queue_seconds=30.0, backlog_seconds=30.0, utilization=1.0)
    assert after([[swamped]] * 2, 1)[-1] == needed(CONFIG, [swamped]) == 4


def test_decide_adds_nothing_twice_while_new_replicas_load() -> None:
    assert after([[LATE]] * 20, 1)[-1] == 2
    worse = ReplicaLoad(queue_seconds=60.0, backlog_seconds=60.0, utilization=1.0)
    assert after([[LATE]] * 4 + [[worse]] * 2, 1)[-1] == needed(CONFIG, [worse]) > 2


def test_decide_removes_one_replica_at_a_time_when_the_rest_has_room_for_a_minute() -> None:
    targets = after([[ReplicaLoad(utilization=0.3)] * 3] * 61 + [[ReplicaLoad(utilization=0.4)] * 2] * 61, 3)
    assert targets[59] == 3 and targets[60] == 2
    assert targets[-1] == 2, "one replica would be used to 0.8"


def test_decide_waits_anew_when_work_has_come_back() -> None:
    loads = [[IDLE, IDLE]] * 50 + [[HALF, HALF]] + [[IDLE, IDLE]] * 50
    assert set(after(loads, 2)) == {2}


def test_decide_keeps_within_the_limits_and_holds_without_data() -> None:
    config = AutoscaleConfig(min_replicas=2, max_replicas=3, ttft_seconds=1.0, down_seconds=1.0)
    assert after([[LATE] * 3] * 9, 3, config)[-1] == 3
    assert after([[IDLE] * 3] * 99, 3, config)[-1] == 2
    assert after([[]] * 9, 3, config) == [3] * 9
    assert after([[]], 9, config) == [3]


LOAD = st.builds(
    ReplicaLoad,
    queue_seconds=st.floats(0, 10),
    prompt_seconds=st.floats(0, 3),
    backlog_seconds=st.floats(0, 100),
    utilization=st.floats(0, 2),
)


@given(st.lists(st.lists(LOAD, max_size=4), max_size=30), st.integers(0, 9))
def test_decide_is_always_within_the_limits(loads: list[list[ReplicaLoad]], target: int) -> None:
    assert all(CONFIG.min_replicas <= found <= CONFIG.max_replicas for found in after(loads, target))


@pytest.mark.parametrize("share", [0.35, 0.5, 0.58])
def test_decide_does_not_flap_on_noise(share: float) -> None:
    """An hour of a fleet of two whose use swings by half of itself from second to second."""
    dice, target, state, changes = random.Random(2), 2, ScaleState(), 0
    config = AutoscaleConfig(ttft_seconds=1.0)
    for now in range(3600):
        used = 2 * share
        loads = [
            ReplicaLoad(
                utilization=used / target * dice.uniform(0.5, 1.5),
                queue_seconds=dice.expovariate(1 / 0.15),
                prompt_seconds=0.3,
                backlog_seconds=dice.expovariate(1 / 0.15),
            )
            for _ in range(target)
        ]
        before = target
        target, state = decide(config, state, loads, target, float(now))
        changes += target != before
    assert changes <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_replicas": 3, "max_replicas": 2},
        {"max_replicas": 0, "min_replicas": 0},
        {"busy_share": 0.0},
        {"up_ticks": 0},
    ],
)
def test_config_is_refused_when_it_is_contradictory(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(wrong)):
        AutoscaleConfig(**wrong)


def test_policy_reads_the_metrics_of_the_replicas_and_keeps_its_state() -> None:
    metrics: dict[str, dict[str, float]] = {}
    for replica in ("a", "b"):
        for name, value in metrics_of(LATE).items():
            metrics.setdefault(name, {})[replica] = value
    metrics["queue_seconds"]["new"] = 0.0  # has not reported all yet
    state: dict[str, Any] = {}
    targets = []
    for now in range(2):
        context = SimpleNamespace(
            target_num_replicas=2, aggregated_metrics=metrics, policy_state=state, current_time=float(now)
        )
        target, state = predicted_ttft_policy(context, ttft_seconds=1.0, max_replicas=8)
        targets.append(target)
    assert targets == [2, 4]
    assert predicted_ttft_policy(
        SimpleNamespace(target_num_replicas=2, aggregated_metrics={}, policy_state={}, current_time=None)
    ) == (2, {"ticks_late": 0, "low_since": None})


def first(seconds: float) -> FirstToken:
    return FirstToken(
        before_queue=0.0, queue=0.0, prefill=seconds, chunk_wait=0.0, num_chunks=1, cached_tokens=0
    )


def test_meter_reports_recent_prompts_backlog_and_use() -> None:
    meter = Meter(max_num_seqs=10)
    for second, seconds in ((0.0, 9.0), (50.0, 0.1), (60.0, 0.3)):
        meter.first_token(first(seconds), second)

    def report(tokens: int, **fields: Any) -> ReplicaReport:
        prefill = (0.0, 0.1, 0.2, 0.5, 1.024)
        stats = EngineStats(step_tokens=tokens)
        return ReplicaReport(replica_id="a", version="v", prefill_seconds=prefill, stats=stats, **fields)

    load = meter.observe(report(0, waiting_tokens=4000, queue_seconds=0.7), 61.0)
    assert load == ReplicaLoad(queue_seconds=0.7, prompt_seconds=0.3, backlog_seconds=2.0)
    for second in range(1, 200):
        load = meter.observe(report(800 * second, num_running=2), 61.0 + second)
    assert load.utilization == pytest.approx(0.4, rel=0.01) and load.prompt_seconds == 0.0
    for second in range(200, 400):
        load = meter.observe(report(0, num_running=7, num_waiting=1), 61.0 + second)
    assert load.utilization == pytest.approx(0.8, rel=0.01), (
        "places count, too; a new engine counts from zero"
    )


@given(st.lists(st.floats(0, 9), min_size=1), st.floats(0.01, 1))
def test_quantile_is_not_exceeded_by_its_share(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


MODEL = MockModel(step_seconds=0.05, prompt_tokens_per_second=1500.0, load_seconds=4.0)


async def served(phases: list[tuple[float, float]], config: AutoscaleConfig) -> dict[str, Any]:
    """Serve arrivals in phases of (seconds, requests a second), with a fleet under ``decide``."""
    fleet, clock = MockFleet(EngineOptions(max_num_seqs=8)), asyncio.get_running_loop().time
    await fleet.add(MODEL)
    meters: dict[str, Meter] = {}
    sizes: list[tuple[float, int]] = []
    reasons: list[FinishReason | None] = []

    async def one(index: int) -> None:
        prompt = [40 + index % 400, *range(32, 331)]
        async for output in fleet.failover.generate(asked(f"r{index}", prompt, max_tokens=10)):
            if output.first:
                for meter in meters.values():
                    meter.first_token(output.first, clock())
            reasons.extend([output.finish_reason] if output.finish_reason else [])

    async def scale() -> None:
        state, target = ScaleState(), 1
        while True:
            await asyncio.sleep(1.0)
            loads = []
            for name, replica in fleet.replicas.items():
                if replica.is_ready and not replica.is_draining:
                    report = await replica.report(Mark())
                    loads.append(meters.setdefault(name, Meter(8)).observe(report, clock()))
            sizes.append((clock(), len(loads)))
            before = target
            target, state = decide(config, state, loads, target, clock())
            for _ in range(target - before):
                fleet.begin(fleet.add(MODEL))
            for name in [n for n, r in fleet.replicas.items() if r.is_ready and not r.is_draining][target:]:
                fleet.begin(fleet.replicas[name].drain())

    fleet.begin(scale())
    dice, answers, index = random.Random(3), [], 0
    for seconds, rate in phases:
        end = clock() + seconds
        while clock() < end:
            index += 1
            answers.append(asyncio.create_task(one(index)))
            await asyncio.sleep(dice.expovariate(rate))
    await asyncio.gather(*answers)
    await fleet.close()
    return {"sizes": sizes, "reasons": reasons, "count": index}


def test_a_load_step_gets_replicas_in_15_s_and_no_stream_is_cut_on_the_way_down() -> None:
    config = AutoscaleConfig(ttft_seconds=1.0, max_replicas=3, down_seconds=20.0)
    found = run(served([(20.0, 1.5), (60.0, 9.0), (90.0, 0.7)], config))
    sizes = dict(found["sizes"])
    assert {size for at, size in sizes.items() if at < 20.0} == {1}
    assert min(at for at, size in sizes.items() if size > 1) - 24.0 <= 15.0
    assert max(sizes.values()) == 3
    assert found["sizes"][-1][1] == 1
    ups_and_downs = [
        b - a for (_, a), (_, b) in zip(found["sizes"], found["sizes"][1:], strict=False) if a != b
    ]
    assert sum(step < 0 for step in ups_and_downs) == 2, "no flapping"
    assert found["reasons"] == [FinishReason.LENGTH] * found["count"]

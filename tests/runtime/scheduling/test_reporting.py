"""Reports of a scheduler; the forecast against simulated waits is in tests/simulation/test_fleet.py."""

from __future__ import annotations

import pytest

from optkit.runtime.prefill import Prefill
from optkit.runtime.report import PREFILL_TOKENS, Mark
from optkit.runtime.scheduling.reporting import report
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import EngineRequest, SamplingParams
from tests.support import schedulers
from tests.support.schedulers import add, advance


def make(num_blocks: int = 400) -> Scheduler:
    return schedulers.make(
        num_blocks=num_blocks, max_model_len=512, max_num_batched_tokens=512, enable_prefix_caching=True
    )


def test_an_idle_scheduler_has_no_queue_and_predicts_prefills() -> None:
    scheduler = make(20)
    found = report(scheduler, Mark(), block_bytes=7)
    assert (found.queue_seconds, found.num_running, found.num_waiting, found.waiting_tokens) == (0.0, 0, 0, 0)
    assert (found.kv_blocks_total, found.block_size, found.block_bytes) == (20, 4, 7)
    assert len(found.prefill_seconds) == len(PREFILL_TOKENS)
    assert list(found.prefill_seconds) == sorted(found.prefill_seconds) and found.prefill_seconds[0] > 0
    assert found.prefill_seconds[2] == scheduler.cost.prefill_seconds(512)
    assert found.decode_seconds > 0 and not found.holds_ends


def test_the_queue_is_the_prefill_of_the_prompts_ahead() -> None:
    scheduler = make()
    for number in range(3):
        add(scheduler, f"r{number}", 100 + number, 1)
    found = report(scheduler, Mark())
    assert found.num_waiting == 3 and found.waiting_tokens == 303
    wanted = sum(scheduler.cost.prefill_seconds(100 + number) for number in range(3))
    assert found.queue_seconds == pytest.approx(wanted)
    scheduler.schedule()
    early, late = (report(scheduler, Mark(), in_step=True) for _ in range(2))
    assert late.queue_seconds <= early.queue_seconds <= wanted


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_prompt_for_another_engine_counts_and_one_without_anybody_in_wait_does_not(is_urgent: bool) -> None:
    scheduler = make()
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    scheduler.add(
        EngineRequest(
            request_id="kv", prompt_ids=tuple(range(200)), sampling=sampling, arrival=0.0,
            prefill=Prefill(is_urgent=is_urgent),
        )
    )  # fmt: skip
    wanted = scheduler.cost.prefill_seconds(200) if is_urgent else 0.0
    assert report(scheduler, Mark()).queue_seconds == pytest.approx(wanted)
    scheduler.schedule()
    in_step = report(scheduler, Mark(), in_step=True).queue_seconds
    assert (in_step > 0) == is_urgent and in_step <= wanted


def test_cached_tokens_of_waiting_prompts_are_no_queue() -> None:
    scheduler = make()
    add(scheduler, "first", 101, 1)
    while scheduler.has_work:
        advance(scheduler)
    add(scheduler, "again", 101, 1)
    assert report(scheduler, Mark()).waiting_tokens == 1


def test_a_long_queue_costs_no_more_to_report() -> None:
    """Beyond the first requests the number at arrival stands in for a look at the cache."""
    scheduler = make()
    for number in range(60):
        add(scheduler, f"r{number}", 100, 1)
    looked = []
    cached_tokens = scheduler.kv.cached_tokens
    scheduler.kv.cached_tokens = lambda request: looked.append(request) or cached_tokens(request)  # type: ignore[method-assign]
    found = report(scheduler, Mark())
    assert len(looked) <= 16 and found.waiting_tokens >= 100


def test_changes_follow_the_mark() -> None:
    scheduler = make()
    add(scheduler, "r", 13, 1)
    while scheduler.has_work:
        advance(scheduler)
    first = report(scheduler, Mark()).changes
    assert first is not None and first.is_snapshot and len(first.added) == 3
    again = report(scheduler, first.mark).changes
    assert again is not None and not again.is_snapshot and again.added == again.dropped == ()

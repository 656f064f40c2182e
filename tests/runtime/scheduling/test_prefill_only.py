"""Requests without an answer: last in line, in small steps beside others, and out of the way at once."""

from __future__ import annotations

import pytest

from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.prefill import NO_ROOM, Prefill
from optkit.runtime.scheduling.prefill_only import ALONE_TOKENS, BESIDE_TOKENS, REST_STEPS
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import EngineRefusal, EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support.schedulers import add, advance, make, plan

LONG = {
    "max_num_batched_tokens": 512, "max_model_len": 1024, "num_blocks": 512, "enable_prefix_caching": True
}  # fmt: skip


def warm(scheduler: Scheduler, name: str, num_prompt: int, token: int = 2, **fields: object) -> None:
    scheduler.add(
        EngineRequest(
            request_id=name,
            prompt_ids=(token,) * num_prompt,
            sampling=SamplingParams(max_tokens=1),
            arrival=0.0,
            prefill=Prefill(**fields),  # type: ignore[arg-type]
        )
    )


def step(scheduler: Scheduler) -> tuple[list[tuple[str, int]], list[TokenOutput]]:
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, [(5,) if item.needs_logits else None for item in batch.items])
    scheduler.check()
    return plan(batch), outputs


def test_alone_it_runs_in_bounded_steps_and_ends_without_a_token() -> None:
    scheduler = make(**LONG)
    warm(scheduler, "w", 400)
    planned, outputs = step(scheduler)
    assert planned == [("w", ALONE_TOKENS)] and not outputs
    planned, (end,) = step(scheduler)
    assert planned == [("w", 400 - ALONE_TOKENS)]
    assert (end.finish_reason, end.token_ids, end.num_prefilled) == (FinishReason.STOP, (), 400)
    assert not scheduler.has_work
    warm(scheduler, "again", 400)
    planned, (end,) = step(scheduler)
    assert not planned and end.num_prefilled == 400 and end.first and end.first.cached_tokens == 400


def test_beside_decodes_it_runs_rarely_and_little() -> None:
    scheduler = make(**LONG)
    add(scheduler, "r", 8, max_tokens=200)
    advance(scheduler)
    warm(scheduler, "w", 400)
    planned = [step(scheduler)[0] for _ in range(2 * (REST_STEPS + 1))]
    sizes = [dict(items).get("w", 0) for items in planned]
    assert sizes[0] == sizes[REST_STEPS + 1] == BESIDE_TOKENS and sum(sizes) == 2 * BESIDE_TOKENS
    assert all(("r", 1) in items for items in planned)


def test_a_prompt_goes_first_and_keeps_its_step() -> None:
    scheduler = make(**LONG)
    warm(scheduler, "w", 400)
    add(scheduler, "r", 700)
    assert step(scheduler)[0] == [("r", 512)]
    assert step(scheduler)[0] == [("r", 188)]
    assert ("w", BESIDE_TOKENS) in step(scheduler)[0]


def test_it_yields_its_place_and_its_blocks() -> None:
    scheduler = make(**LONG | {"max_num_seqs": 1})
    warm(scheduler, "w", 400)
    step(scheduler)
    add(scheduler, "r", 8, max_tokens=2)
    assert step(scheduler)[0] == [("r", 8)]
    step(scheduler)
    planned, (end,) = step(scheduler)
    assert planned == [("w", 400 - ALONE_TOKENS)] and end.num_prefilled == 400  # nothing was computed twice
    scheduler = make(**LONG | {"num_blocks": 110, "max_model_len": 440})
    warm(scheduler, "w", 400)
    step(scheduler)
    add(scheduler, "r", 400, max_tokens=2)
    assert step(scheduler)[0] == [("r", 400)]


def test_a_pin_never_takes_the_blocks_of_a_known_request() -> None:
    scheduler = make(**LONG | {"num_blocks": 64, "max_model_len": 256})
    add(scheduler, "r", 8, max_tokens=140)  # 37 blocks
    advance(scheduler)
    warm(scheduler, "w", 120, pin="p")  # 30 blocks
    ends: list[TokenOutput] = []
    for _ in range(60):
        ends += [output for output in step(scheduler)[1] if output.request_id == "w"]
    assert [(end.finish_reason, end.error) for end in ends] == [(FinishReason.ERROR, NO_ROOM)]
    while scheduler.has_work:
        step(scheduler)
    warm(scheduler, "w", 120, pin="p")
    assert step(scheduler)[1][0].num_prefilled == 120
    with pytest.raises(EngineRefusal, match="pinned prefixes leave room for 136 tokens"):
        add(scheduler, "r", 8, max_tokens=140)


def test_a_lease_is_no_reason_to_refuse() -> None:
    scheduler = make(**LONG | {"num_blocks": 64, "max_model_len": 256})
    warm(scheduler, "w", 120, pin="p", lease=1000.0)
    step(scheduler)
    assert scheduler.stats().kv_blocks_pinned == 30
    add(scheduler, "r", 8, max_tokens=140)
    assert scheduler.stats().kv_blocks_pinned == 0


@pytest.mark.parametrize("windows", [(0,), (0, 8), (0, 8, 16)])
def test_what_fits_beside_a_pin_ends(windows: tuple[int, ...]) -> None:
    """Prompts of any length: a request is refused on arrival, or ends, and waits for no block forever."""
    limits = {
        "num_blocks": 48,
        "max_model_len": 160,
        "pinned_cache_share": 0.5,
        "enable_prefix_caching": True,
    }
    outcomes = set()
    for num_more in range(1, 126):
        scheduler = make(**limits, kv_windows=windows)  # type: ignore[arg-type]
        warm(scheduler, "w", 32, pin="p")
        while scheduler.has_work:
            step(scheduler)
        assert scheduler.stats().kv_blocks_pinned > 0
        prompt, params = (2,) * 32 + (3,) * num_more, SamplingParams(max_tokens=2)
        received = EngineRequest(request_id="r", prompt_ids=prompt, sampling=params, arrival=0.0)
        try:
            scheduler.add(received)
        except EngineRefusal:
            outcomes.add("refused")
            continue
        num_steps = 0
        while scheduler.has_work:
            step(scheduler)
            num_steps += 1
            assert num_steps < 20, f"{num_more} tokens"
        outcomes.add("ended")
    assert outcomes == ({"ended"} if len(windows) == 1 else {"ended", "refused"})


@pytest.mark.parametrize("pin", ["p", ""])
def test_windows_that_slide_off_shared_blocks_promise_no_block_twice(pin: str) -> None:
    """A block that a window leaves stays with the pin, or with another request, and can't be promised again."""
    limits = {
        "num_blocks": 64,
        "max_model_len": 160,
        "pinned_cache_share": 0.5,
        "enable_prefix_caching": True,
    }
    for num_more in range(20, 100, 3):
        scheduler = make(**limits, kv_windows=(0, 24))  # type: ignore[arg-type]
        warm(scheduler, "w", 32, pin=pin)
        while scheduler.has_work:
            step(scheduler)
        names = ["a", "b", "c"]
        for token, name in enumerate(names, 3):
            prompt, params = (2,) * 32 + (token,) * num_more, SamplingParams(max_tokens=3)
            scheduler.add(EngineRequest(request_id=name, prompt_ids=prompt, sampling=params, arrival=0.0))
        ends: list[TokenOutput] = []
        for _ in range(200):
            ends += [output for output in step(scheduler)[1] if output.finish_reason]
        assert sorted((end.request_id, end.error) for end in ends) == [(name, None) for name in names], (
            num_more
        )
        assert not scheduler.has_work


def test_an_answer_that_leaves_pinned_blocks_behind_is_refused_or_ends() -> None:
    """A rolling window begins with pinned blocks and goes on with as many of its own."""
    outcomes = {}
    for window in range(2, 44):
        scheduler = make(num_blocks=16, max_model_len=64, pinned_cache_share=0.7, enable_prefix_caching=True)
        warm(scheduler, "w", 40, pin="p")
        while scheduler.has_work:
            step(scheduler)
        assert scheduler.stats().kv_blocks_pinned == 10
        received = EngineRequest(
            request_id="r",
            prompt_ids=(2,) * 41,
            sampling=SamplingParams(max_tokens=150),
            arrival=0.0,
            rolling=RollingWindow(window, 2),
        )
        try:
            scheduler.add(received)
        except EngineRefusal:
            outcomes[window] = "refused"
            continue
        num_steps = 0
        while scheduler.has_work:
            step(scheduler)
            num_steps += 1
            assert num_steps < 300, f"a window of {window} tokens"
        outcomes[window] = "ended"
    assert outcomes == {window: "ended" if 2 + window + 3 <= 6 * 4 else "refused" for window in range(2, 44)}

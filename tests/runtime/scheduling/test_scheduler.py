"""Scheduler: budgets, order, finishing, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.sampling.proposer import SpeculationStats
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import (
    QUEUE_TIMEOUT,
    EngineRefusal,
    EngineRequest,
    Failure,
    FinishReason,
    Request,
    SamplingParams,
)
from tests.support.schedulers import add, advance, make, plan
from tests.support.speculation import EveryStep


def test_a_long_prompt_is_chunked_and_never_stalls_a_decode() -> None:
    scheduler = make()
    add(scheduler, "short", 3)
    assert advance(scheduler) == [("short", 3)]
    add(scheduler, "long", 40)
    assert advance(scheduler) == [("short", 1), ("long", 15)]
    assert advance(scheduler) == [("short", 1), ("long", 15)]
    assert advance(scheduler) == [("short", 1), ("long", 10)]
    assert advance(scheduler) == [("short", 1), ("long", 1)]


def test_prompts_are_finished_one_after_another() -> None:
    """A piece of the next prompt in the same step would delay the first token of this one and hasten no other."""
    scheduler = make()
    add(scheduler, "a", 20)
    add(scheduler, "b", 20)
    assert advance(scheduler) == [("a", 16)]
    assert advance(scheduler) == [("a", 4)]
    assert advance(scheduler) == [("a", 1), ("b", 15)]


def test_short_prompts_share_a_step_up_to_the_target() -> None:
    scheduler = make(prefill_target_tokens=8)
    for name, length in (("a", 3), ("b", 5), ("c", 1), ("d", 9), ("e", 1)):
        add(scheduler, name, length)
    assert advance(scheduler) == [("a", 3), ("b", 5)]
    assert advance(scheduler)[2:] == [("c", 1)]  # d does not fit as a whole, and nobody overtakes it
    assert advance(scheduler)[3:] == [("d", 9)]


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=2)
    assert advance(scheduler) == [("a", 1), ("b", 1)]
    assert advance(scheduler) == [("a", 1), ("b", 1)]
    assert advance(scheduler) == [("c", 1)]


def test_the_youngest_is_preempted_and_recomputed_with_its_output() -> None:
    scheduler = make(num_blocks=5, block_size=4)
    add(scheduler, "old", 4, max_tokens=13)
    advance(scheduler)
    add(scheduler, "young", 4, max_tokens=8)
    advance(scheduler)
    add(scheduler, "late", 16, max_tokens=1)
    while not scheduler.num_preemptions:
        advance(scheduler)
    assert [request.request_id for request in scheduler.running] == ["old"]
    young = scheduler.waiting[0]
    generated = len(young.token_ids)
    assert young.request_id == "young", "the newcomer overtook it"
    assert generated > 4 and young.num_computed == 0 and not young.block_tables
    while young in scheduler.waiting:
        last = advance(scheduler)
    assert ("young", generated) in last


def test_freed_blocks_admit_the_head_of_the_queue_first() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    add(scheduler, "a", 12, max_tokens=1)
    add(scheduler, "b", 16, max_tokens=1)
    add(scheduler, "c", 1, max_tokens=1)
    assert advance(scheduler) == [("a", 12)]  # c would fit, but b came first
    assert advance(scheduler) == [("b", 16)]
    assert advance(scheduler) == [("c", 1)]
    assert not scheduler.has_work


def test_admission_leaves_running_sequences_room_to_grow() -> None:
    """Else the newcomer would be preempted, and its prompt computed twice, at the next token of the old one."""
    scheduler = make(num_blocks=3, block_size=4)
    add(scheduler, "a", 4, max_tokens=2)
    add(scheduler, "b", 8, max_tokens=1)
    assert advance(scheduler) == [("a", 4)]
    assert advance(scheduler) == [("a", 1)]
    assert advance(scheduler) == [("b", 8)]
    assert scheduler.num_preemptions == 0


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    add(scheduler, "r", 1)
    with pytest.raises(EngineRefusal, match="'r' is being served"):
        add(scheduler, "r", 1)


def finish(scheduler: Scheduler, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Feed ``tokens`` to the only sequence until it ends."""
    emitted: list[int] = []
    for token in tokens:
        batch = scheduler.schedule()
        (output,) = scheduler.update(batch, [(token,)])
        emitted += output.token_ids
        if output.finish_reason:
            return emitted, output.finish_reason
    return emitted, None


def test_a_stop_token_ends_and_is_not_emitted() -> None:
    scheduler = make()
    add(scheduler, "r", 3, stop_token_ids=(7, 9))
    assert finish(scheduler, [5, 6, 9, 5]) == ([5, 6], FinishReason.STOP)
    assert scheduler.stats().kv_blocks_used == 0


def test_max_tokens_ends_with_the_last_token() -> None:
    scheduler = make()
    add(scheduler, "r", 3, max_tokens=2)
    assert finish(scheduler, [5, 6, 7]) == ([5, 6], FinishReason.LENGTH)


def test_a_full_context_ends() -> None:
    scheduler = make(max_model_len=5)
    add(scheduler, "r", 3, max_tokens=100)
    assert finish(scheduler, [5, 6, 7]) == ([5, 6], FinishReason.LENGTH)


def test_a_failure_ends_its_request_only() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    a, b = scheduler.update(scheduler.schedule(), [Failure("broken"), (5,)])
    assert (a.request_id, a.finish_reason, a.error, a.token_ids) == ("a", FinishReason.ERROR, "broken", ())
    assert (b.request_id, b.finish_reason, b.token_ids) == ("b", None, (5,))
    scheduler.check()


def test_results_of_an_aborted_request_are_dropped() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    batch = scheduler.schedule()
    scheduler.abort("a")
    add(scheduler, "a", 3)  # the same id again is another request
    assert scheduler.update(batch, [(5,)]) == []
    assert scheduler.waiting[0].num_computed == 0


def test_stats_follow_the_queues() -> None:
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    advance(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.step_tokens) == (1, 1, 5)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (2, 64)


def test_a_prompt_that_runs_goes_on_when_a_more_urgent_one_finds_no_place() -> None:
    """Else the one waits for a place and the other for its turn, for ever."""
    scheduler = make(scheduling_policy="slo", ttft_slo_ms=500, max_num_seqs=1)
    add(scheduler, "first", 40)
    advance(scheduler)
    params = SamplingParams(max_tokens=1)
    scheduler.add(
        EngineRequest(request_id="urgent", prompt_ids=(1,), sampling=params, arrival=0.0, priority=-99)
    )
    assert advance(scheduler) == [("first", 16)]


def test_who_waits_too_long_for_a_turn_is_told_and_who_has_begun_is_not() -> None:
    now = [0.0]
    scheduler = make(max_num_seqs=1, queue_timeout=5.0)
    scheduler.clock = lambda: now[0]
    for name in ("running", "waiting"):
        add(scheduler, name, 3)
    advance(scheduler)
    now[0] = 4.9
    advance(scheduler)
    now[0] = 5.1
    batch = scheduler.schedule()
    assert plan(batch) == [("running", 1)]
    (_, lost) = scheduler.update(batch, [(5,)])
    assert (lost.request_id, lost.finish_reason, lost.error) == ("waiting", FinishReason.ERROR, QUEUE_TIMEOUT)
    scheduler.check()


def test_what_raises_for_one_sequence_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make()
    add(scheduler, "good", 3)
    add(scheduler, "bad", 5)
    admit = scheduler.kv.admit

    def broken(request: Request, *args: int) -> bool:
        if request.num_prompt == 5:
            raise RuntimeError("broken")
        return admit(request, *args)

    monkeypatch.setattr(scheduler.kv, "admit", broken)
    batch = scheduler.schedule()
    assert plan(batch) == [("good", 3)]
    outputs = scheduler.update(batch, [(5,)])
    assert [(out.request_id, out.finish_reason) for out in outputs] == [
        ("good", None),
        ("bad", FinishReason.ERROR),
    ]
    scheduler.check()


class Eager(EveryStep):
    """Guesses as many tokens as it may; all of them are wrong where 5 is sampled."""

    def __init__(self) -> None:
        self.stats = SpeculationStats()

    def propose(self, sequences: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        return [(9,) * limit for limit in limits]

    def observe(self, request: Request, draft: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass


def guessing(scheduler: Scheduler) -> Scheduler:
    scheduler.proposer = Eager()
    return scheduler


def test_guesses_leave_a_waiting_prompt_its_tokens() -> None:
    scheduler = guessing(make())
    for name in "abc":
        add(scheduler, name, 1, max_tokens=40)
    advance(scheduler)
    add(scheduler, "long", 30)
    assert advance(scheduler) == [("a", 1), ("b", 1), ("c", 1), ("long", 13)]
    assert advance(scheduler) == [("a", 1), ("b", 1), ("c", 1), ("long", 13)]


def test_guesses_fill_what_decodes_and_prompts_leave() -> None:
    scheduler = guessing(make())
    add(scheduler, "a", 1, max_tokens=40)
    advance(scheduler)
    assert advance(scheduler) == [("a", 16)]
    add(scheduler, "short", 6, max_tokens=1)
    assert advance(scheduler) == [("a", 10), ("short", 6)]
    assert advance(scheduler) == [("a", 16)]


def test_a_text_read_through_a_window_leaves_the_rest_of_its_steps_to_others() -> None:
    """A chunk of such a text ends where the window moves, so a long prompt behind it is read beside it."""
    scheduler, window = make(max_num_batched_tokens=40, prefill_target_tokens=24), RollingWindow(6, 2)
    params = SamplingParams(max_tokens=2)
    text = EngineRequest(
        request_id="text", prompt_ids=(1,) * 200, sampling=params, arrival=0.0, rolling=window
    )
    scheduler.add(text)
    assert advance(scheduler) == [("text", 11)]
    add(scheduler, "prompt", 60, max_tokens=2)
    add(scheduler, "other", 30, max_tokens=2)
    assert advance(scheduler) == [("text", 4), ("prompt", 34)]
    assert advance(scheduler) == [("text", 4), ("prompt", 26)]
    assert advance(scheduler) == [("prompt", 1), ("text", 4), ("other", 30)]


prompt_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(max_examples=40)
@given(prompt_lengths, prompt_lengths, st.integers(4, 40), st.integers(8, 40), st.integers(0, 20))
def test_prompts_advance_in_each_step_as_without_guesses(
    first: list[int], later: list[int], tokens: int, blocks: int, target: int
) -> None:
    """However wrong the guesses are, and however scarce KV is: also admissions and preemptions are the same."""
    limits = {"max_num_batched_tokens": tokens, "num_blocks": blocks, "prefill_target_tokens": target}
    plain, guessed = make(**limits), guessing(make(**limits))
    arrivals = [*[(0, length) for length in first], *[(3 * i, length) for i, length in enumerate(later)]]
    for step in itertools.count():
        for number, (at, length) in enumerate(arrivals):
            if at == step:
                for scheduler in (plain, guessed):
                    add(scheduler, str(number), min(length, 4 * blocks - 9), max_tokens=9)
        batch, other = plain.schedule(), guessed.schedule()
        known = [
            (name, num_new - len(item.draft))
            for (name, num_new), item in zip(plan(other), other.items, strict=True)
        ]
        assert known == plan(batch)
        assert other.num_tokens <= tokens
        for scheduler, items in ((plain, batch), (guessed, other)):
            scheduler.update(items, [(5,) if item.needs_logits else None for item in items.items])
            scheduler.check()
        if step > 3 * len(later) and not plain.has_work:
            break
    assert not guessed.has_work and guessed.num_preemptions == plain.num_preemptions


@pytest.mark.parametrize("broken", ["propose", "finished"])
def test_a_proposer_that_raises_costs_its_guesses_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = guessing(make())

    def raises(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(scheduler.proposer, broken, raises)
    add(scheduler, "r", 3, max_tokens=3)
    assert finish(scheduler, [5, 6, 7]) == ([5, 6, 7], FinishReason.LENGTH)
    scheduler.check()


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(30, 8), (4, 1)])
def test_a_fault_of_the_prefix_cache_ends_its_request_and_frees_its_kv(
    num_prompt: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt, and with the last token of an answer."""
    scheduler = make()
    add(scheduler, "bad", num_prompt, max_tokens=max_tokens)

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(scheduler.kv, "publish", broken)
    batch = scheduler.schedule()
    (output,) = scheduler.update(batch, [(5,) if item.needs_logits else None for item in batch.items])
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert not scheduler.has_work and scheduler.stats().kv_blocks_used == 0
    scheduler.check()

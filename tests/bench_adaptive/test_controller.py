"""The feedback loop on a real scheduler: one limit at a time, with causes, undone where it hurts, seldom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from bench.adaptive.ablation import COSTS, Limits, config, served
from bench.adaptive.controller import (
    BLOCKED,
    PATIENCE,
    SETTLE,
    Bounds,
    Controller,
    set_value,
    value,
)
from bench.adaptive.load import MIXES, stepped
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import FinishReason, FirstToken, TokenOutput

MIX = MIXES[0]
BOUNDS = Bounds(0.7, 0.03)


def made(limits: Limits | None = None) -> Scheduler:
    return Scheduler(config(MIX, limits or Limits()))


def first(name: str, seconds: float) -> TokenOutput:
    parts = FirstToken(
        before_queue=0.0, queue=0.0, prefill=seconds, chunk_wait=0.0, num_chunks=1, cached_tokens=0
    )
    return TokenOutput(request_id=name, token_ids=(1,), first=parts)


def live(controller: Controller, scheduler: Scheduler, seconds: Sequence[float], start: float) -> None:
    """A first token of each of ``seconds``, two a second from ``start`` on."""
    for number, ttft in enumerate(seconds):
        controller(scheduler, start + number / 2, [first(f"{start}-{number}", ttft)])


def regular(rate: float, seconds: float) -> list[float]:
    return [number / rate for number in range(int(rate * seconds))]


def test_late_first_tokens_turn_admission_on_and_then_lengthen_chunks_a_minute_later() -> None:
    scheduler, controller = made(), Controller(BOUNDS, regular(2.0, 200))
    live(controller, scheduler, [1.4] * 150, 1.0)
    assert [move.limit for move in controller.moves] == ["admission", "chunk"]
    assert scheduler.config.enforce_ttft_slo and scheduler.forecast.config.enforce_ttft_slo
    assert value(scheduler, "chunk") == pytest.approx(0.03 * 1.4)
    assert controller.moves[1].at - controller.moves[0].at >= PATIENCE
    assert all("TTFT is 2.00 of the bound" in move.cause for move in controller.moves)


def test_a_move_that_hurts_is_undone_and_its_limit_rests() -> None:
    scheduler, controller = made(Limits(admission=True)), Controller(BOUNDS, regular(2.0, 300))
    live(controller, scheduler, [1.4] * 12, 1.0)
    assert [move.limit for move in controller.moves] == ["chunk"]
    at = controller.moves[0].at
    live(controller, scheduler, [2.8] * 40, 7.0)
    assert len(controller.moves) == 2 and "undone" in controller.moves[1].cause
    assert SETTLE <= controller.moves[1].at - at <= SETTLE + 1
    assert value(scheduler, "chunk") == pytest.approx(0.03)
    live(controller, scheduler, [2.8] * int(2 * (BLOCKED - 20)), 27.0)
    assert len(controller.moves) == 2


def test_slow_answers_shorten_chunks_and_room_gives_places_back() -> None:
    scheduler, controller = made(), Controller(BOUNDS, regular(2.0, 300))
    for number in range(20):
        at = 1.0 + number / 2
        controller(scheduler, at, [first(str(number), 0.1)])
        end = TokenOutput(request_id=str(number), token_ids=(2,), finish_reason=FinishReason.LENGTH)
        controller(scheduler, at + 0.1, [end])
    assert controller.moves[0].limit == "chunk" and value(scheduler, "chunk") == pytest.approx(0.03 / 1.4)
    set_value(scheduler, "places", 10)
    live(controller, scheduler, [0.1] * 150, 80.0)
    assert [move.limit for move in controller.moves][1] == "places" and value(scheduler, "places") > 10


def test_no_latency_inside_the_dead_band_moves_anything() -> None:
    scheduler, controller = made(), Controller(BOUNDS, regular(2.0, 300))
    live(controller, scheduler, [0.7 * 1.05, 0.7 * 0.95] * 100, 1.0)
    assert controller.moves == []


def test_a_change_of_the_rate_is_seen_and_a_steady_rate_is_none() -> None:
    even, doubled = regular(4.0, 100), [*regular(4.0, 60), *(60 + at for at in regular(12.0, 40))]
    steady, stepping = Controller(BOUNDS, even), Controller(BOUNDS, doubled)
    assert not any(steady.is_changed(float(now)) for now in range(6, 100))
    assert not any(stepping.is_changed(float(now)) for now in range(6, 60))
    assert any(stepping.is_changed(float(now)) for now in range(60, 66))


def test_moves_are_at_most_one_a_minute_while_arrivals_are_regular() -> None:
    requests = MIX.requests(regular(6.0, 200), seed=1)
    found = served(MIX, COSTS, requests, Limits(), adaptive=True).moves
    moves = [move for move in found if move.at < 200]  # then arrivals end
    assert len(moves) > 1
    for a, b in itertools.pairwise(moves):
        assert b.at - a.at >= (SETTLE if "undone" in b.cause else PATIENCE)


def test_after_a_step_of_the_load_moves_come_within_seconds() -> None:
    requests = MIX.requests(stepped([1.0, 12.0], 40.0, seed=2), seed=2)
    moves = served(MIX, COSTS, requests, Limits(), adaptive=True).moves
    after = [move.at for move in moves if move.at > 40]
    assert after and after[0] < 48 and min(b - a for a, b in itertools.pairwise(after)) < 5


def test_limits_follow_latencies_under_the_policy_slo_alone() -> None:
    plain = config(MIX, Limits())
    from msgspec.structs import replace

    with pytest.raises(ValueError, match="policy slo"):
        value(Scheduler(replace(plain, scheduling_policy="fcfs")), "chunk")

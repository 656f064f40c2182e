"""A fleet as one engine: choice, deaths, replicas that come and go, and what covers all replicas."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from optkit.fleet.engine import FleetEngine
from optkit.fleet.failover import Failover, Placed, Wanted
from optkit.runtime.prefill import PinInfo
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE
from optkit.runtime.process.ipc import PinList
from optkit.runtime.types import EngineRequest, EngineStats, FinishReason, TokenOutput
from optkit.serve.quarantine import fingerprint
from tests.support.fleet import ChangingMembers, ask, fleet, fleet_of, local, on_loop, soon, tokens_of, within
from tests.support.serve_fakes import FakeEngine, SteppedEngine
from tests.support.tiny_tokenizer import TEXT

QUIET = EngineStats()


def engines(count: int) -> list[FakeEngine]:
    found = [FakeEngine() for _ in range(count)]
    for engine in found:
        engine.stats = QUIET
    return found


@on_loop
async def test_answers_are_those_of_a_single_engine() -> None:
    prompts = [list(range(3 + index, 40 + 2 * index)) for index in range(8)]
    alone = SteppedEngine()
    expected = [await tokens_of(alone.generate(ask(str(i), p))) for i, p in enumerate(prompts)]
    async with fleet(SteppedEngine(), SteppedEngine()) as engine:
        runs = (tokens_of(engine.generate(ask(str(i), p))) for i, p in enumerate(prompts))
        assert await within(asyncio.gather(*runs)) == expected


@on_loop
async def test_requests_are_shared_out_before_any_report_shows_them() -> None:
    found = engines(3)
    for engine in found:
        engine.gate = asyncio.Event()
    async with fleet(*found) as together:
        tasks = [asyncio.create_task(tokens_of(together.generate(ask(str(i))))) for i in range(9)]
        await soon(lambda: sum(len(engine.requests) for engine in found) == 9)
        assert Counter(len(engine.requests) for engine in found) == {3: 3}
        for engine in found:
            engine.gate.set()
        await within(asyncio.gather(*tasks))


@on_loop
async def test_leaving_an_answer_early_aborts_it_at_the_replica() -> None:
    (only,) = engines(1)
    async with fleet(only) as together:
        stream = together.generate(ask())
        await anext(stream)
        await stream.aclose()
        assert only.aborted == ["a"]


class Dying(FakeEngine):
    """An engine that dies after ``after`` tokens of each answer, begun or not."""

    def __init__(self, error: str, after: int = 0) -> None:
        super().__init__()
        self.error, self.after, self.stats = error, after, QUIET

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        for index in range(self.after):
            yield self._outputs(request)[index]
        name = request.request_id
        yield TokenOutput(request_id=name, token_ids=(), finish_reason=FinishReason.ERROR, error=self.error)


@on_loop
async def test_an_answer_of_a_dead_engine_goes_on_with_another_replica() -> None:
    dying, good = Dying(ENGINE_DIED, after=2), engines(1)[0]
    good.script = lambda request: TEXT  # of a request that goes on: the rest is asked for
    async with fleet(dying) as engine:
        members = engine._members
        assert isinstance(members, ChangingMembers)
        stream = engine.generate(ask())
        first = [await anext(stream), await anext(stream)]
        members.set(*members.present, local(good, "1"))
        rest = [output async for output in stream]
    assert len(dying.requests) == 1 and rest[-1].error is None
    (moved,) = good.requests
    assert moved.continued == 2
    assert moved.prompt_ids[-2:] == tuple(token for output in first for token in output.token_ids)


@on_loop
async def test_a_decision_is_explained_once_the_request_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (replica,) = engines(1)
    sent, generate = list[int](), replica.generate

    def counted(request: EngineRequest) -> AsyncIterator[TokenOutput]:
        sent.append(len(caplog.messages))
        return generate(request)

    async with fleet(replica) as engine:
        monkeypatch.setattr(replica, "generate", counted)
        with caplog.at_level("INFO", "optkit.fleet.router"):
            assert await tokens_of(engine.generate(ask()))
    assert sent == [0] and len(caplog.messages) == 1 and "predicted" in caplog.text


@on_loop
async def test_a_replica_that_is_not_taken_has_no_work_of_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another suspect comes first while a replica is chosen."""
    (replica,) = engines(1)
    async with fleet(replica) as engine:
        request = ask(prompt=list(range(40)))

        async def choose(wanted: Wanted) -> Placed | None:
            placed = await engine._place(wanted)
            engine.failover.ledger.source_died("0", "other", fingerprint(ask("other", [9])), time.monotonic())
            return placed

        engine.failover = Failover(choose, patience_seconds=0.0)
        engine.failover.ledger.source_died("gone", "a", fingerprint(request), time.monotonic())
        before = engine.router.choose(engine.router.prompt(request))
        engine.router.withdrawn(before)
        with caplog.at_level("INFO", "optkit.fleet.router"):
            (output,) = [output async for output in engine.generate(request)]
        after = engine.router.choose(engine.router.prompt(request))
        num_open = engine.router._known["0"].num_open
    assert output.error == ENGINE_GONE and not replica.requests and not caplog.messages
    assert (before.queue, after.queue) == (0.0, 0.0)
    assert num_open == 1, "the last choice alone"


@on_loop
async def test_a_request_waits_for_a_replica_that_is_on_its_way() -> None:
    (late,) = engines(1)
    late.is_healthy = False
    async with fleet(late) as engine:
        assert not engine.is_healthy and engine.is_restarting
        task = asyncio.create_task(tokens_of(engine.generate(ask())))
        await asyncio.sleep(0.02)
        assert not task.done()
        late.is_healthy = True
        assert await within(task)
        assert engine.is_healthy and not engine.is_restarting


@on_loop
async def test_a_pause_of_the_process_makes_no_replica_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.fleet.engine.SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("optkit.fleet.engine.REPORT_SECONDS", 0.01)
    async with fleet(*engines(2)) as together:
        for _ in range(5):
            time.sleep(0.15)
            time.sleep(0.15)
            for _ in range(5):
                assert together.is_healthy and len(together.ready_ids) == 2
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)


@on_loop
async def test_a_report_that_can_not_be_read_makes_a_replica_unready_until_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("optkit.fleet.engine.REPORT_SECONDS", 0.01)
    async with fleet(*engines(1)) as together:
        update = together.router.update

        def refuse(*_: object) -> None:
            raise ValueError("a report of another protocol")

        monkeypatch.setattr(together.router, "update", refuse)
        await soon(lambda: not together.is_healthy)
        monkeypatch.setattr(together.router, "update", update)
        await soon(lambda: together.is_healthy)
    assert "a report of another protocol" in caplog.text


@on_loop
async def test_a_request_without_any_replica_fails() -> None:
    async with fleet() as engine:
        engine.failover = Failover(engine._place, patience_seconds=0.05)
        (output,) = [output async for output in engine.generate(ask())]
        assert output.error == ENGINE_GONE
        assert (await engine.pins()).error and (await engine.start_profile(1)).error


@on_loop
async def test_a_draining_replica_finishes_and_gets_nothing_new() -> None:
    old, new = engines(2)
    old.gate = asyncio.Event()
    leaving = local(old, "old")
    members = ChangingMembers(leaving)
    async with fleet_of(members) as engine:
        running = asyncio.create_task(tokens_of(engine.generate(ask("a"))))
        await soon(lambda: old.requests)
        draining = asyncio.create_task(leaving.drain())
        members.set(leaving, local(new, "new"))
        await soon(lambda: len(engine.ready_ids) == 1 and len(engine.reports) == 2)
        assert await within(tokens_of(engine.generate(ask("b"))))
        assert not draining.done() and len(new.requests) == 1
        old.gate.set()
        assert await within(running)
        await within(draining)


@on_loop
async def test_a_silent_replica_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.fleet.engine.SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("optkit.fleet.router.STALE_SECONDS", 0.2)
    monkeypatch.setattr("optkit.fleet.engine.REPORT_SECONDS", 0.01)
    mute, good = engines(2)
    silent = local(mute, "0")
    async with fleet_of(ChangingMembers(silent, local(good, "1"))) as engine:

        async def never(since: object) -> object:
            return await asyncio.Event().wait()

        silent.report = never  # type: ignore[method-assign, assignment]
        await soon(lambda: len(engine.ready_ids) == 1)
        for index in range(4):
            await tokens_of(engine.generate(ask(str(index))))
    assert (len(mute.requests), len(good.requests)) == (0, 4)


@on_loop
async def test_no_request_is_placed_on_a_replica_that_has_left() -> None:
    first, second = (local(engine, str(index)) for index, engine in enumerate(engines(2)))
    members = ChangingMembers(first, second)
    async with fleet_of(members) as engine:
        wanted = Wanted(ask(), None, frozenset({"1"}))
        assert await engine._place(wanted) is not None
        members.set(second)
        async with asyncio.timeout(20.0):
            while "0" in engine._known:
                await asyncio.sleep(0)
        assert await engine._place(wanted) is None


@on_loop
async def test_counters_never_fall_when_replicas_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.fleet.engine.REPORT_SECONDS", 0.01)
    a, b = engines(2)
    a.stats = EngineStats(num_running=1, step_tokens=100, step_sizes=(1, 2))
    b.stats = EngineStats(num_running=2, step_tokens=50, step_sizes=(0, 1, 4))
    first, second = local(a, "a"), local(b, "b")
    members = ChangingMembers(first, second)
    async with fleet_of(members) as engine:
        await soon(lambda: engine.stats.num_running == 3)
        assert (engine.stats.step_tokens, engine.stats.step_sizes) == (150, (1, 3, 4))
        members.set(second)
        await soon(lambda: engine.stats.num_running == 2)
        assert (engine.stats.step_tokens, engine.num_restarts) == (150, 1)


@on_loop
async def test_embeddings_come_from_one_replica_and_another_when_it_dies() -> None:
    dying, good = engines(2)
    dying.embed_error = (ENGINE_DIED, False)
    good.stats = EngineStats(num_running=5)
    async with fleet(dying, good) as engine:
        answer = await engine.embed([[1, 2]], "mean")
    assert answer.error is None and answer.size and len(good.embedded) == 1


@on_loop
async def test_resets_pins_and_profiles_reach_all_replicas(tmp_path: Path) -> None:
    found = engines(2)

    async def pins(drop: str | None = None) -> PinList:
        pin = PinInfo(name="p", cache_salt=None, num_tokens=4, num_bytes=1, age=0.0)
        return PinList("pins", (pin,))

    found[0].pins = pins  # type: ignore[method-assign]
    async with fleet(*found) as engine:
        await engine.reset_prefix_cache()
        assert [one.resets for one in found] == [1, 1]
        assert [pin.name for pin in (await engine.pins()).pins] == ["p"]
        assert (await engine.start_profile(5)).error is None
        done = await engine.stop_profile(str(tmp_path))
    assert done.steps == {"decode": 10}
    assert sorted(Path(file).parent.name for file in done.files) == ["0", "1"]


@on_loop
async def test_start_fails_when_no_replica_comes() -> None:
    engine = FleetEngine(ChangingMembers())
    with pytest.raises(TimeoutError):
        await engine.start(0.05)
    await engine.stop()

"""A replica behind a link: same answers, and a clear end of all streams when the link breaks."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from optkit.fleet import served_replica
from optkit.fleet.replica import Mark, ReplicaGone, Work
from optkit.runtime.types import EngineRequest
from tests.support.fleet import ask, linked, on_loop, soon, tokens_of, within
from tests.support.serve_fakes import FakeEngine


def work(name: str = "a") -> Work:
    return Work(request=ask(name))


@on_loop
async def test_a_link_carries_the_same_tokens() -> None:
    engine = FakeEngine()
    expected = await tokens_of(engine.generate(ask()))
    async with linked(engine) as (remote, _):
        runs = (tokens_of(remote.generate(work(str(index)))) for index in range(20))
        assert await within(asyncio.gather(*runs)) == [expected] * 20


@on_loop
async def test_outputs_of_all_requests_share_messages() -> None:
    """The number of messages follows the steps of the engine and not the requests."""
    engine = FakeEngine()
    engine.delay = 0.01
    async with linked(engine) as (remote, stub):
        runs = [tokens_of(remote.generate(work(str(index)))) for index in range(16)]
        found = await within(asyncio.gather(*runs))
    outputs = sum(map(len, found))
    assert stub.calls.count("take") < outputs / 4


@on_loop
async def test_the_arrival_is_on_the_clock_of_the_replica() -> None:
    engine = FakeEngine()
    async with linked(engine) as (remote, _):
        request = msgspec.structs.replace(ask(), arrival=time.monotonic() - 3.0)
        await tokens_of(remote.generate(Work(request=request)))
    assert engine.requests[0].arrival == pytest.approx(request.arrival, abs=0.5)


@on_loop
async def test_leaving_early_aborts_at_the_replica() -> None:
    engine = FakeEngine()
    engine.delay = 0.005
    async with linked(engine) as (remote, _):
        stream = remote.generate(work())
        await anext(stream)
        await stream.aclose()
        await soon(lambda: engine.aborted == ["a"])


@on_loop
async def test_a_broken_link_ends_every_stream_and_a_new_link_serves_again() -> None:
    engine = FakeEngine()
    engine.delay = 0.005
    async with linked(engine) as (remote, stub):
        begun = remote.generate(work("begun"))
        await anext(begun)
        engine.gate = asyncio.Event()
        queued = asyncio.ensure_future(anext(remote.generate(work("queued"))))
        await soon(lambda: len(engine.requests) == 2)
        stub.cut()
        with pytest.raises(ReplicaGone) as caught:
            async for _ in begun:
                pass
        assert caught.value.was_begun and caught.value.replica_id == "far"
        with pytest.raises(ReplicaGone) as caught:
            await within(queued)
        assert not caught.value.was_begun
        with pytest.raises(ReplicaGone):
            await anext(remote.generate(work("refused")))
        engine.gate = None
        stub.restore()
        opened = stub.calls.count("link")
        await soon(lambda: stub.calls.count("link") > opened and stub.calls[-1] == "take")
        assert await within(tokens_of(remote.generate(work("again"))))


@on_loop
async def test_requests_of_a_server_that_has_gone_are_aborted() -> None:
    engine = FakeEngine()
    engine.gate = asyncio.Event()
    async with linked(engine) as (remote, stub):
        lost = asyncio.ensure_future(anext(remote.generate(work())))
        await soon(lambda: engine.requests)
        stub.cut()
        with pytest.raises(ReplicaGone):
            await within(lost)
        await soon(lambda: engine.aborted == ["a"])


class Failing(FakeEngine):
    def generate(self, request: EngineRequest):  # type: ignore[no-untyped-def]
        raise KeyError("a bug")


@on_loop
async def test_a_bug_in_a_replica_ends_one_request() -> None:
    async with linked(Failing()) as (remote, _):
        (output,) = [output async for output in remote.generate(work())]
        assert output.error == served_replica.FAILED


@on_loop
async def test_all_further_calls_cross_the_link() -> None:
    engine = FakeEngine()
    async with linked(engine) as (remote, _):
        report = await remote.report(Mark())
        assert (report.replica_id, report.stats) == ("far", engine.stats)
        assert (await remote.embed([[1, 2]], "mean")).size
        await remote.reset_prefix_cache()
        assert engine.resets == 1
        assert (await remote.pins()).pins == ()
        assert (await remote.start_profile(3)).error is None
        assert await remote.engine_info() is None


@on_loop
async def test_a_drained_replica_has_handed_out_everything() -> None:
    engine = FakeEngine()
    engine.delay = 0.002
    async with linked(engine) as (remote, _):
        running = asyncio.ensure_future(tokens_of(remote.generate(work())))
        await soon(lambda: engine.requests)
        await within(remote.drain())
        assert running.done() or await within(running)
        assert (await remote.report(Mark())).is_draining
        with pytest.raises(ReplicaGone):
            await anext(remote.generate(work("late")))

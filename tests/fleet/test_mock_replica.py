"""A mock replica keeps time on the loop, reports, drains, and dies with all its streams."""

from __future__ import annotations

import asyncio

import pytest

from optkit.fleet.mock import MockModel
from optkit.fleet.mock_replica import MockReplica
from optkit.fleet.replica import Mark, ReplicaGone, Work
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.types import TokenOutput
from tests.fleet.test_failover import asked, run

MODEL = MockModel(step_seconds=0.01, prompt_tokens_per_second=1000.0, load_seconds=3.0)


async def collect(replica: MockReplica, name: str, prompt: list[int], length: int = 10) -> list[TokenOutput]:
    return [output async for output in replica.generate(Work(request=asked(name, prompt, max_tokens=length)))]


def test_generate_takes_the_seconds_of_the_costs_and_says_so() -> None:
    async def go() -> tuple[list[TokenOutput], float]:
        replica, loop = MockReplica("a", MODEL), asyncio.get_running_loop()
        await replica.start()
        assert loop.time() == pytest.approx(3.0)
        return await collect(replica, "r", list(range(40, 304))), loop.time() - 3.0

    outputs, seconds = run(go())
    assert seconds == pytest.approx(0.01 + 0.264 + 9 * 0.011)
    assert [t for output in outputs for t in output.token_ids] == MODEL.answer(list(range(40, 304)), 10)
    first = outputs[0].first
    assert first is not None and first.prefill == pytest.approx(0.274)


def test_report_foretells_the_queue_and_drain_waits_for_the_last_stream() -> None:
    async def go() -> None:
        replica = MockReplica("a", MODEL, "v7", EngineOptions(max_num_seqs=2))
        assert not (await replica.report(Mark())).is_ready
        await replica.start()
        answers = [asyncio.create_task(collect(replica, f"r{i}", [40 + i] * 1000)) for i in range(3)]
        await asyncio.sleep(0.001)
        report = await replica.report(Mark())
        assert (report.version, report.is_ready, report.is_draining) == ("v7", True, False)
        assert report.num_running + report.num_waiting == 3
        assert 1.0 < report.queue_seconds < 4.0, "about three prompts of a second"
        assert report.prefill_seconds[4] == pytest.approx(2.0, rel=0.1)
        draining = asyncio.create_task(replica.drain())
        await asyncio.sleep(0.001)
        assert (await replica.report(Mark())).is_draining and not draining.done()
        with pytest.raises(ReplicaGone) as refused:
            await collect(replica, "late", [40])
        assert not refused.value.was_begun
        await asyncio.gather(*answers)
        await draining

    run(go())


def test_kill_ends_every_stream_and_start_brings_another_engine() -> None:
    async def go() -> None:
        replica = MockReplica("a", MODEL, options=EngineOptions(max_num_seqs=1))
        deaths: list[MockReplica] = []
        replica.on_death = deaths.append
        await replica.start()
        answers = [asyncio.create_task(collect(replica, f"r{i}", [40 + i])) for i in range(2)]
        await asyncio.sleep(0.025)
        replica.kill()
        replica.kill()
        gone = await asyncio.gather(*answers, return_exceptions=True)
        assert [isinstance(error, ReplicaGone) and error.was_begun for error in gone] == [True, False]
        assert deaths == [replica] and not replica.is_ready and replica.num_streams == 0
        await replica.start()
        assert len(await collect(replica, "r3", [40])) == 10 and replica.num_starts == 2

    run(go())


def test_closing_the_outputs_frees_the_place() -> None:
    async def go() -> None:
        replica = MockReplica("a", MODEL, options=EngineOptions(max_num_seqs=1))
        await replica.start()
        first = asyncio.create_task(collect(replica, "r1", [40], 1000))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        assert len(await collect(replica, "r2", [41])) == 10
        assert replica.num_streams == 0

    run(go())

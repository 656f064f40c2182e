"""The engine process: start, stream, abort, die, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from optkit.errors import UserError
from optkit.runtime.process import client as client_module
from optkit.runtime.process import ipc
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED, EngineClient, EngineDied
from optkit.runtime.report import PREFILL_TOKENS, Mark
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support.engine_process import FACTORY, PATIENCE, eventually, request
from tests.support.fakes import fake_engine

LONG = 3000  # tokens: with a step of 50 ms they outlast PATIENCE


def client(factory: str = FACTORY, **options: Any) -> EngineClient:
    return EngineClient(json.dumps(options), factory=factory)


async def collect(engine: EngineClient, r: EngineRequest) -> list[TokenOutput]:
    return [output async for output in engine.generate(r)]


def with_engine(scenario: Callable[[EngineClient], Awaitable[None]], **options: Any) -> None:
    """Run ``scenario`` on a started engine, then stop it; its process must be gone."""

    async def main() -> None:
        engine = client(**options)
        await engine.start(PATIENCE)
        pid = engine.pid
        try:
            await asyncio.wait_for(scenario(engine), PATIENCE)
        finally:
            await engine.stop()
        assert not psutil.pid_exists(pid)
        assert not engine.is_healthy

    asyncio.run(main())


def test_concurrent_streams_equal_the_engine_in_this_process() -> None:
    prompts = [[i, i + 1, *range(i)] for i in range(16)]
    options = {"num_blocks": 20, "max_num_seqs": 5}
    wanted = fake_engine(options=options).generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))

    async def scenario(engine: EngineClient) -> None:
        assert engine.is_healthy
        assert (
            engine.info.config.num_blocks == 20
            and engine.info.load_seconds >= 0
            and engine.info.pid == engine.pid
        )
        assert not [c for c in psutil.Process(engine.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # Ctrl-C and a service manager are the parent's business
            os.kill(engine.pid, number)
        streams = await asyncio.gather(
            *(collect(engine, request(f"r{i}", prompt)) for i, prompt in enumerate(prompts))
        )
        assert [[t for output in stream for t in output.token_ids] for stream in streams] == wanted
        assert all(stream[-1].finish_reason is FinishReason.LENGTH for stream in streams)
        assert engine.stats.kv_blocks_total == 20 and engine.stats.kv_blocks_used == 0

    with_engine(scenario, **options)


def test_leaving_a_stream_aborts_its_request() -> None:
    async def first_token(engine: EngineClient, r: EngineRequest) -> None:
        async with aclosing(engine.generate(r)) as stream:
            async for _ in stream:
                return

    async def scenario(engine: EngineClient) -> None:
        await first_token(engine, request("left", [1], max_tokens=LONG))
        cancelled = asyncio.create_task(collect(engine, request("cancelled", [2], max_tokens=LONG)))
        await eventually(lambda: engine.stats.num_running > 0)
        cancelled.cancel()
        await eventually(lambda: engine.stats.num_running == engine.stats.kv_blocks_used == 0)
        aborted = asyncio.create_task(collect(engine, request("aborted", [3], max_tokens=LONG)))
        await eventually(lambda: engine.stats.num_running == 1)
        await engine.abort("aborted")
        assert (await aborted)[-1].finish_reason is FinishReason.ABORT
        (refused,) = await collect(engine, request("refused", [1] * 4000))
        assert refused.finish_reason is FinishReason.ERROR and "no room to answer" in (refused.error or "")
        assert len(await collect(engine, request("after", [4], max_tokens=2))) == 2
        assert engine.stats.kv_blocks_used == 0

    with_engine(scenario, step_delay=0.05, num_blocks=2000, max_model_len=4000)


@pytest.mark.parametrize("cause", ["kill", "crash", "garbage"])
def test_a_dead_engine_ends_every_stream_with_an_error(cause: str) -> None:
    async def scenario(engine: EngineClient) -> None:
        tasks = [
            asyncio.create_task(collect(engine, request(f"r{i}", [i], max_tokens=60))) for i in range(10)
        ]
        await eventually(lambda: engine.stats.num_running == 10)
        if cause == "kill":
            os.kill(engine.pid, signal.SIGKILL)
        elif cause == "crash":
            tasks.append(asyncio.create_task(collect(engine, request("crash", [63], max_tokens=60))))
        else:
            engine._writer.write(ipc.HEADER.pack(3) + b"abc")
        await engine.wait_dead()
        ends = [(await task)[-1] for task in tasks]
        assert {(end.finish_reason, end.error) for end in ends} == {(FinishReason.ERROR, ENGINE_DIED)}
        assert not engine.is_healthy
        (late,) = await collect(engine, request("late", [1]))
        assert late.error == ENGINE_GONE

    # die_token must not be sampled by the others: the script keeps them to token 1
    with_engine(scenario, step_delay=0.05, die_token=63, script=[1], max_num_seqs=12)


def test_a_dead_engine_says_which_requests_it_had_begun() -> None:
    async def scenario(engine: EngineClient) -> None:
        tasks = []
        for name in ("first", "second", "third"):
            tasks.append(asyncio.create_task(collect(engine, request(name, [1], max_tokens=LONG))))
            await eventually(lambda: engine.stats.num_running + engine.stats.num_waiting == len(tasks))
        engine.kill()
        assert [(await task)[-1].error for task in tasks] == [ENGINE_DIED, ENGINE_GONE, ENGINE_GONE]

    with_engine(scenario, step_delay=0.05, max_num_seqs=1, num_blocks=2000, max_model_len=4000)


def test_an_engine_in_the_step_that_ends_it_has_begun_the_request() -> None:
    async def scenario(engine: EngineClient) -> None:
        (died,) = await collect(engine, request("deadly", [63]))
        assert died.error == ENGINE_DIED

    with_engine(scenario, die_token=63)


def test_a_long_step_makes_an_engine_silent_and_not_unhealthy(tmp_path: Path) -> None:
    async def scenario(engine: EngineClient) -> None:
        engine.silence_seconds = 0.5
        slow = asyncio.create_task(collect(engine, request("slow", [63])))
        await eventually(lambda: engine.is_silent)
        assert engine.is_healthy
        (tmp_path / "end").touch()
        assert (await slow)[-1].finish_reason is FinishReason.LENGTH

    with_engine(scenario, slow_token=63, until=str(tmp_path / "end"))


def test_a_step_that_everybody_left_is_cancelled(tmp_path: Path) -> None:
    async def scenario(engine: EngineClient) -> None:
        names = [f"r{i}" for i in range(4)]
        streams = [
            asyncio.create_task(collect(engine, request(name, [1], max_tokens=LONG))) for name in names
        ]
        await eventually(lambda: engine.stats.num_running == len(names))
        endless = asyncio.create_task(collect(engine, request("endless", [63] * 9)))
        await eventually((tmp_path / "never.begun").exists)
        assert engine.stats.kv_blocks_used
        for task in [*streams, endless]:
            task.cancel()
        await eventually(lambda: engine.stats.num_running == engine.stats.kv_blocks_used == 0)
        (first, *_) = await collect(engine, request("again", [62] * 9))
        assert first.first is not None and first.first.cached_tokens == 0

    options = {"slow_token": 63, "until": str(tmp_path / "never"), "parts": True, "script": [1]}
    with_engine(scenario, step_delay=0.01, num_blocks=2000, max_model_len=4000, **options)


def test_silence_counts_only_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "TICK_SECONDS", 0.25)

    async def scenario(engine: EngineClient) -> None:
        os.kill(engine.pid, signal.SIGSTOP)
        an_hour_later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0)
        monkeypatch.setattr(
            client_module, "time", an_hour_later
        )  # as if both processes had been stopped for it
        assert not engine.is_silent
        await asyncio.sleep(2 * client_module.TICK_SECONDS)
        assert not engine.is_silent
        engine.silence_seconds = 0.5
        await eventually(lambda: engine.is_silent)
        os.kill(engine.pid, signal.SIGCONT)
        await eventually(lambda: not engine.is_silent)

    with_engine(scenario)


def test_stop_interrupts_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STOP_SECONDS", 0.3)

    async def main() -> None:
        engine = client(step_delay=600.0)
        await engine.start(PATIENCE)
        stream = asyncio.create_task(collect(engine, request("r", [1])))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(engine.stop(), PATIENCE)
        assert [output.error for output in await stream] == [ENGINE_STOPPED]
        assert not psutil.pid_exists(engine.pid)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"load_error": "user"},
            UserError,
            "there: the artifact is broken. build it again.",
        ),
        ({"load_error": "bug"}, EngineDied, "KeyError: 'weights'"),
        ({"factory": "os:system"}, EngineDied, "os:system is not a factory"),
        ({"load_delay": 600.0}, TimeoutError, None),
    ],
)
def test_a_failed_start_says_why_and_leaves_no_process(
    options: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STOP_SECONDS", 0.3)

    async def main() -> int | None:
        engine = client(**options)
        with pytest.raises(error, match=message):
            await engine.start(1.0 if error is TimeoutError else PATIENCE)
        return engine.pid

    assert not psutil.pid_exists(asyncio.run(main()))


def test_embed_answers_with_the_reason_when_the_engine_gives_no_vectors() -> None:
    async def scenario(engine: EngineClient) -> None:
        answer = await engine.embed([[1, 2]], "last")
        assert answer.is_user_error and answer.error == "embeddings are computed on CPUs alone"
        assert (await engine.embed([[10_000]], "mean")).error == "token 10000 is not in the vocabulary of 32"
        assert await collect(engine, request("after", [1, 2]))

    with_engine(scenario, vocab_size=32)


def test_embed_ends_when_the_engine_dies() -> None:
    async def scenario(engine: EngineClient) -> None:
        busy = asyncio.create_task(collect(engine, request("busy", [1, 2], max_tokens=40)))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(engine.embed([[1, 2]], "last"))
        await asyncio.sleep(0)
        engine.kill()
        assert (await waiting).error in (ENGINE_DIED, "embeddings are computed on CPUs alone")
        await busy
        await engine.wait_dead()
        assert (await engine.embed([[1]], "last")).error == ENGINE_GONE

    with_engine(scenario, vocab_size=32)


def test_a_report_follows_the_cache_and_digests_agree_between_processes_of_a_secret() -> None:
    prompt = list(range(1, 14))

    async def digests(secret: bytes) -> set[bytes]:
        engine = EngineClient(json.dumps({}), factory=FACTORY, cache_secret=secret)
        await engine.start(PATIENCE)
        try:
            before = (await engine.report(Mark())).report
            assert before is not None and before.changes is not None and before.changes.is_snapshot
            assert before.num_running == 0 and len(before.prefill_seconds) == len(PREFILL_TOKENS)
            await collect(engine, request("r", prompt, max_tokens=1))
            after = (await engine.report(before.changes.mark)).report
            assert after is not None and after.changes is not None and not after.changes.is_snapshot
            return set(after.changes.added)
        finally:
            await engine.stop()

    async def main() -> None:
        one, two, other = await asyncio.gather(*(digests(secret) for secret in (b"s" * 32, b"s" * 32, b"")))
        assert one == two and len(one) == 3 and not one & other

    asyncio.run(main())


def test_a_report_is_answered_in_the_middle_of_a_step(tmp_path: Path) -> None:
    until = tmp_path / "end"

    async def scenario(engine: EngineClient) -> None:
        stream = asyncio.create_task(collect(engine, request("r", [1])))
        await eventually(until.with_suffix(".begun").exists)
        answer = await asyncio.wait_for(engine.report(Mark()), PATIENCE)
        assert not stream.done() and answer.report is not None and answer.report.num_running == 1
        until.touch()
        await stream

    with_engine(scenario, slow_token=1, until=str(until), parts=True)


def test_a_dead_engine_has_no_report() -> None:
    async def scenario(engine: EngineClient) -> None:
        engine.kill()
        answer = await engine.report(Mark())
        assert answer.report is None and answer.error in (ENGINE_DIED, ENGINE_GONE)

    with_engine(scenario)

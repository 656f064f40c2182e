"""The engine process: start, stream, abort, die, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.runtime.process import client as client_module
from optkit.runtime.process import ipc, worker
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED, EngineClient, EngineDied
from optkit.runtime.process.launch import launch
from optkit.runtime.process.worker import ParentGone, Worker
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support.fakes import FACTORY, fake_engine

PATIENCE = 120.0
LONG = 3000  # tokens: with a step of 50 ms they outlast PATIENCE


def client(factory: str = FACTORY, **options: Any) -> EngineClient:
    return EngineClient(json.dumps(options), factory=factory, threads=1)


def request(name: str, prompt: list[int], max_tokens: int = 8) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0)


async def collect(engine: EngineClient, r: EngineRequest) -> list[TokenOutput]:
    return [output async for output in engine.generate(r)]


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


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


def gone(pid: int) -> bool:
    """True once the process has ended (as an orphan it may stay a zombie where nobody reaps it)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
        os.kill(engine.pid, signal.SIGINT)  # Ctrl-C is the parent's business
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


def test_a_launched_worker_that_nobody_takes_is_killed() -> None:
    with launch(FACTORY) as launched:
        pid = launched.process.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_launched_worker_is_taken_once() -> None:
    async def main() -> None:
        with launch(FACTORY, threads=1) as launched:
            engine = EngineClient("", factory=FACTORY, launched=launched)
            await engine.start(PATIENCE)
            assert engine.pid == launched.process.pid
            with pytest.raises(RuntimeError, match="once"):
                launched.take()
        assert engine.is_healthy
        await engine.stop()

    asyncio.run(main())


def test_stop_interrupts_a_step_that_hangs() -> None:
    async def main() -> None:
        engine = client(step_delay=600.0)
        await engine.start(PATIENCE)
        stream = asyncio.create_task(collect(engine, request("r", [1])))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(engine.stop(), PATIENCE)
        assert [output.error for output in await stream] == [ENGINE_STOPPED]
        assert not psutil.pid_exists(engine.pid)

    asyncio.run(main())


@pytest.mark.parametrize("farewell", [ipc.frame(ipc.Shutdown()), b""])
def test_the_worker_leaves_in_the_middle_of_its_work(farewell: bytes) -> None:
    """On order, or when the pipe closes."""
    ours, theirs = socket.socketpair()
    ours.sendall(ipc.frame(request("r", [1], max_tokens=60)) + farewell)
    ours.close()
    with theirs, pytest.raises(ParentGone):
        Worker(fake_engine(), theirs).serve()


@pytest.mark.parametrize("farewell", [ipc.frame(ipc.Shutdown()), b"", ipc.HEADER.pack(3) + b"abc"])
def test_the_worker_leaves_in_the_middle_of_a_step(farewell: bytes, tmp_path: Path) -> None:
    """On order, when the pipe closes, or when what comes is no message."""
    engine = fake_engine(options={"slow_token": 1, "until": str(tmp_path / "never"), "parts": True})
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor() as pool:
        serving = pool.submit(Worker(engine, theirs).serve)
        ours.sendall(ipc.frame(request("r", [1])))
        asyncio.run(eventually((tmp_path / "never.begun").exists))
        ours.sendall(farewell)
        ours.close()
        assert isinstance(serving.exception(PATIENCE), ParentGone)


def test_a_worker_in_a_long_step_shows_that_it_makes_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.01)
    engine = fake_engine(options={"slow_token": 1, "until": str(tmp_path / "end"), "parts": True})
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor() as pool:
        serving = pool.submit(Worker(engine, theirs).serve)
        ours.sendall(ipc.frame(request("r", [1])))
        asyncio.run(eventually((tmp_path / "end.begun").exists))
        beats = ipc.frame(ipc.Begun(("r",))) + 3 * ipc.frame(ipc.Heartbeat())
        received = ours.recv(4096)
        while not received.endswith(beats):
            received += ours.recv(4096)
        ours.close()
        assert isinstance(serving.exception(PATIENCE), ParentGone)


def test_an_idle_worker_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor() as pool:
        serving = pool.submit(Worker(fake_engine(), theirs).serve)
        heartbeat = ipc.frame(ipc.Heartbeat())
        assert ours.recv(len(heartbeat), socket.MSG_WAITALL) == heartbeat
        ours.close()
        assert isinstance(serving.exception(PATIENCE), ParentGone)


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
    options: Any, error: type[Exception], message: str
) -> None:
    async def main() -> int | None:
        engine = client(**options)
        with pytest.raises(error, match=message):
            await engine.start(1.0 if error is TimeoutError else PATIENCE)
        return engine.pid

    assert not psutil.pid_exists(asyncio.run(main()))


@pytest.mark.parametrize("load_delay", [0.0, 600.0])
def test_the_worker_dies_with_its_parent(load_delay: float) -> None:
    """Whether it is loading or idle when the parent is killed."""
    program = textwrap.dedent(f"""
        import asyncio, time
        from optkit.runtime.process.client import EngineClient
        async def main():
            engine = EngineClient('{{"load_delay": {load_delay}}}', factory="{FACTORY}", threads=1)
            start = asyncio.create_task(engine.start())
            if not {load_delay}:
                await start
            await asyncio.sleep(1.0)
            print(engine.pid, flush=True)
            time.sleep(600)
        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert not gone(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    asyncio.run(eventually(lambda: gone(child)))


@given(st.lists(st.integers(1, 40)), st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_frames_survive_any_cut(cuts: list[int], prompts: list[int]) -> None:
    messages: list[ipc.ToWorker] = [request(f"r{i}", [i] * 9) for i in prompts]
    messages += [ipc.Abort("r"), ipc.Shutdown()]
    data = b"".join(ipc.frame(message) for message in messages)
    reader, received = ipc.FrameReader(), []
    for cut in cuts:
        received += reader.feed(data[:cut])
        data = data[cut:]
    assert received + reader.feed(data) == messages


def test_frames_that_are_too_large_or_no_message_are_refused() -> None:
    with pytest.raises(ipc.ProtocolError, match="larger than"):
        ipc.FrameReader().feed(ipc.HEADER.pack(ipc.MAX_FRAME + 1))
    with pytest.raises(ipc.ProtocolError, match="larger than"):
        ipc.frame(ipc.Abort("x" * ipc.MAX_FRAME))
    for body in (b"\xc1", ipc._encoder.encode({"type": "ready"}), ipc._encoder.encode({"type": "abort"})):
        with pytest.raises(ipc.ProtocolError):
            ipc.FrameReader().feed(ipc.HEADER.pack(len(body)) + body)

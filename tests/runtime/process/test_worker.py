"""The engine process: it leaves in the middle of its work, shows that it lives, and dies with its parent."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from optkit.runtime.process import ipc, worker
from optkit.runtime.process.worker import ParentGone, Worker
from tests.support.engine_process import FACTORY, PATIENCE, eventually, request
from tests.support.fakes import fake_engine


def gone(pid: int) -> bool:
    """True once the process has ended (as an orphan it may stay a zombie where nobody reaps it)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
        while beats not in received:
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


@pytest.mark.parametrize("load_delay", [0.0, 600.0])
def test_the_worker_dies_with_its_parent(load_delay: float) -> None:
    """Whether it is loading or idle when the parent is killed."""
    program = textwrap.dedent(f"""
        import asyncio, time
        from optkit.runtime.process.client import EngineClient
        async def main():
            engine = EngineClient('{{"load_delay": {load_delay}}}', factory="{FACTORY}")
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

"""Locks between processes: exclusive and shared, released by a kill, and no lock on what was removed meanwhile."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.machine.locks import Locks, hold, locked
from tests.pipeline.test_cache import in_new_process


def test_hold_excludes_others_unless_both_are_shared(tmp_path: Path) -> None:
    first = hold(tmp_path, shared=True)
    second = hold(tmp_path, shared=True)
    assert first is not None and second is not None and hold(tmp_path) is None
    for descriptor in (first, second):
        os.close(descriptor)
    with locked(tmp_path) as held:
        assert held and hold(tmp_path, shared=True) is None


def test_take_succeeds_when_the_holder_was_killed_and_release_removes_the_file(
    tmp_path: Path,
) -> None:
    def die() -> None:
        Locks(tmp_path).take("step")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_new_process(die) == -signal.SIGKILL
    locks = Locks(tmp_path)
    with locks.holding("step"), locks.holding("step"):
        assert locks.file("step").exists()
    assert list(tmp_path.iterdir()) == []


def test_holding_calls_busy_and_waits_for_the_holder(tmp_path: Path) -> None:
    """Each of four processes adds one to a number fifty times, under a lock whose file comes and goes."""
    counter, context = tmp_path / "counter", multiprocessing.get_context("fork")
    counter.write_text("0")

    def count() -> None:
        for _ in range(50):
            with Locks(tmp_path).holding("counter"):
                counter.write_text(str(int(counter.read_text()) + 1))

    processes = [context.Process(target=count) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4 and counter.read_text() == "200"

    def other() -> None:
        calls: list[int] = []
        with Locks(tmp_path).holding("step", lambda: (calls.append(1), mine.release("step"))[0]):
            os._exit(len(calls))

    mine = Locks(tmp_path)
    mine.take("step")
    waiting = context.Process(target=other)
    waiting.start()  # in the child ``mine`` is a copy that shares the lock, so the child can release it
    waiting.join(60)
    assert waiting.exitcode == 1


def test_hold_raises_a_user_error_when_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="no locks"):
        Locks(tmp_path).take("step")
    with locked(tmp_path) as held:
        assert not held

"""The process behind its thread: closed while it works, and asked after it is closed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from optkit.runtime.types import Constraint
from optkit.serve.constraints.messages import Verdict
from optkit.serve.constraints.process import FAILURES, CompilerProcess
from tests.support.tiny_tokenizer import tiny_tokenizer

DIGITS = Constraint("regex", "[0-9]+")


def test_a_verdict_comes_and_close_leaves_no_process() -> None:
    process = CompilerProcess(tiny_tokenizer())
    assert process.pid is None
    assert process.ask(DIGITS).result(60) == Verdict(constraint=DIGITS)
    assert process.pid is not None and psutil.pid_exists(process.pid)
    process.close()
    assert not psutil.pid_exists(process.pid)


def test_close_ends_the_wait_for_a_process_that_hangs() -> None:
    process = CompilerProcess(tiny_tokenizer())
    process.ask(DIGITS).result(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    waiting = [process.ask(Constraint("regex", text)) for text in ("a", "b")]
    process.close()
    for future in waiting:
        assert isinstance(future.exception(60), FAILURES)
    assert not psutil.pid_exists(process.pid)


def test_a_waiter_cannot_cancel_a_verdict() -> None:
    process = CompilerProcess(tiny_tokenizer())
    future = process.ask(DIGITS)
    assert not future.cancel()
    assert future.result(60).error is None
    process.close()
    with pytest.raises(RuntimeError):
        process.ask(DIGITS)

"""The process that compiles grammars (``child``), with a thread before it.

The pipes belong to the thread and to no event loop: an application restarted on another loop goes on with the same
process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

import msgspec

from optkit.runtime.types import Constraint
from optkit.serve.constraints.messages import HEADER, Tokens, Verdict, frame
from optkit.text.tokenizer import Tokenizer

CHILD = "optkit.serve.constraints.child"
ANSWER_SECONDS = 30.0  # of the process, its start among them
FAILURES = (OSError, EOFError, msgspec.MsgspecError)


class CompilerProcess:
    """Started for the first constraint, and again when dead.

    Attributes:
        pid: of the process last started; None before the first one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pid: int | None = None
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optkit-constraints")
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, constraint: Constraint) -> Future[Verdict]:
        """The verdict on ``constraint``, after those asked for before; one of ``FAILURES`` if the process fails.

        The future can't be cancelled: a waiter that leaves takes the verdict from nobody.
        """
        future: Future[Verdict] = Future()
        future.set_running_or_notify_cancel()
        self._thread.submit(self._answer, constraint, future)
        return future

    def close(self) -> None:
        """End the process and the thread; constraints still asked for fail."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.submit(self._end)
        self._thread.shutdown()

    def _answer(self, constraint: Constraint, future: Future[Verdict]) -> None:
        try:
            future.set_result(self._exchange(constraint))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiter gets it
            self._end()
            future.set_exception(error)

    def _exchange(self, constraint: Constraint) -> Verdict:
        """Send ``constraint`` to the process, and wait for the verdict."""
        first = b""
        if self._process is None or self._process.poll() is not None:
            first = frame(Tokens(self._tokenizer.to_json(), self._tokenizer.vocab_size))
            self._start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise OSError("the process has no pipes")
        with _killed_late(process):
            process.stdin.write(first + frame(constraint))
            process.stdin.flush()
            (length,) = HEADER.unpack(_read(process.stdout, HEADER.size))
            return msgspec.msgpack.decode(_read(process.stdout, length), type=Verdict)

    def _start(self) -> None:
        self._end()
        with self._lock:
            if self._is_closed:
                raise EOFError("the server ends")
            pipe, command = subprocess.PIPE, (sys.executable, "-P", "-m", CHILD)
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            self.pid = self._process.pid

    def _end(self) -> None:
        """End the process; on the thread alone, for no other may close a pipe in use."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # bytes left for a dead process
                    pipe.close()


@contextlib.contextmanager
def _killed_late(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill ``process`` after ``ANSWER_SECONDS``, which ends a wait for the pipes."""
    timer = threading.Timer(ANSWER_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError("the process ended")
    return data

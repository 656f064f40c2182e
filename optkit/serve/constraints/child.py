"""The process for compiling grammars on trial, each in a separate fork with bounds on time and memory.

A schema of a few bytes can describe a grammar of any size, and llguidance has no clock. The kernel ends a fork after
``CPU_SECONDS`` of processor time, and limits the memory. The tables of the vocabulary take longer than a grammar and
are built once, in the parent of the forks. The process reads ``Tokens`` and then constraints from
standard input, writes a ``Verdict`` for each to standard output, and ends with the pipe.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar

import msgspec

from optkit.extras import need_extra
from optkit.machine.parent import leave_signals_to_parent
from optkit.runtime.structured import FEATURE
from optkit.runtime.types import Constraint, ConstraintFailed
from optkit.serve.constraints.messages import HEADER, Tokens, Verdict, frame

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_SECONDS = 0.05  # of compiling; ordinary schemas take 1 to 10 ms
WALL_SECONDS = 5.0  # on a busy machine a fork waits for a processor
MEMORY_BYTES = 512 * 2**20  # beyond those of the process at the fork
TOO_SLOW = f"it takes more than {CPU_SECONDS * 1000:.0f} ms to compile; simplify it"
TOO_LARGE = "it takes too much memory to compile; simplify it"

T = TypeVar("T")


def main() -> int:
    leave_signals_to_parent()
    need_extra("structured", FEATURE)
    from optkit.runtime.structured import grammar

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read(source, Tokens)
    if first is None:
        return 0
    tokens: LLTokenizer | None = None
    failure: str | None = None
    try:
        tokens = grammar.vocabulary(first.tokenizer_json, first.vocab_size)
    except ConstraintFailed as error:
        failure = str(error)
    while (constraint := read(source, Constraint)) is not None:
        verdict = Verdict(failure)
        if tokens is not None:
            verdict = in_fork(partial(grammar.tried, constraint, tokens))
        sink.write(frame(verdict))
        sink.flush()
    return 0


def read(source: BinaryIO, kind: type[T]) -> T | None:
    """The next message; None at the end of the pipe."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return msgspec.msgpack.decode(source.read(*HEADER.unpack(header)), type=kind)


def in_fork(work: Callable[[], Constraint]) -> Verdict:
    """The verdict of ``work``, done in a fork of limited time and memory. ``ConstraintFailed`` is a refusal."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, sending)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        in_time = select.select([pipe], [], [], WALL_SECONDS)[0]
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        body = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if body:
        return msgspec.msgpack.decode(body, type=Verdict)
    slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL)
    return Verdict(TOO_SLOW if slow else TOO_LARGE)


def _work_and_exit(work: Callable[[], Constraint], sending: int) -> NoReturn:
    """Do ``work`` in the fork, write the verdict, end the process without any cleaning up."""
    try:
        if sys.platform == "linux":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what native code says when it dies
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            verdict = Verdict(constraint=work())
        except ConstraintFailed as error:
            verdict = Verdict(str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(verdict))
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

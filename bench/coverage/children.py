"""Trials in child processes, in turn, with limits of time and memory.

Children are forked from a server with torch and transformers already imported, which saves 7 s a trial.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection

from bench.coverage.sizes import NOT_TRIED
from bench.coverage.trial import REFUSED, Outcome, trial

SECONDS = 60  # of CPU time
PATIENCE = 10  # times as long by the clock, for a busy machine
MEMORY = 6 << 30  # bytes of address space


def outcome_of(name: str, seconds: int = SECONDS) -> Outcome:
    """The outcome of the trial of type ``name``."""
    if name in NOT_TRIED:
        return Outcome(REFUSED, f"not tried: {NOT_TRIED[name]}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.coverage.preload"])
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(name, seconds, writer), daemon=True)
    child.start()
    writer.close()
    try:
        if not reader.poll(seconds * PATIENCE):
            child.kill()
            return too_slow(seconds)
        return Outcome(**json.loads(reader.recv_bytes()))
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return too_slow(seconds)
        return Outcome(REFUSED, f"the process ended with exit code {child.exitcode}")
    finally:
        child.join()


def too_slow(seconds: int) -> Outcome:
    return Outcome(REFUSED, f"no result within {seconds} s", seconds=seconds)


def run(name: str, seconds: int, writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    writer.send_bytes(json.dumps(trial(name).as_dict()).encode())

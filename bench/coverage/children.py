"""Trials in child processes, one at a time, each with limits of time and memory.

Children are forked from a server that imported torch and transformers once, so a trial pays no imports (7 s).
"""

from __future__ import annotations

import json
import multiprocessing
import resource
from multiprocessing.connection import Connection

from bench.coverage.sizes import NOT_TRIED
from bench.coverage.trial import REFUSED, Outcome, trial

SECONDS = 60
MEMORY = 6 << 30  # bytes of address space


def outcome_of(name: str, seconds: float = SECONDS) -> Outcome:
    """The outcome of the trial of type ``name``."""
    if name in NOT_TRIED:
        return Outcome(REFUSED, f"not tried: {NOT_TRIED[name]}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.coverage.preload"])
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(name, writer), daemon=True)
    child.start()
    writer.close()
    try:
        if not reader.poll(seconds):
            child.kill()
            return Outcome(REFUSED, f"no result within {seconds:.0f} s", seconds=seconds)
        return Outcome(**json.loads(reader.recv_bytes()))
    except EOFError:
        child.join()
        return Outcome(REFUSED, f"the process ended with exit code {child.exitcode}")
    finally:
        child.join()


def run(name: str, writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    writer.send_bytes(json.dumps(trial(name).as_dict()).encode())

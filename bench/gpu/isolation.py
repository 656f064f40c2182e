"""Measurements in worker processes: a crash or a hang costs a single measurement.

A CUDA error stays with its process: after an illegal access nothing more runs there. So a worker without a working
device ends, a worker over the time limit is killed, and a new worker continues with the remaining names. Several
workers compile kernels on several cores; timings use a single worker.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.gpu.results import Row, attempt

Measure = Callable[[], Row]
Open = Callable[[], Mapping[str, Measure]]  # what a worker can measure, by name; has to be picklable
GLANCE = 0.5  # seconds between looks at the clock
STARTING = 60.0  # more that the first one may take: a process imports torch
ENDING = 20.0  # seconds that a process gets to end by itself


@dataclass
class Worker:
    """A process, the waiting names, and the start time of the current measurement."""

    open: Open
    names: deque[str]
    process: Any = None
    pipe: Connection | None = None
    since: float = field(default_factory=time.monotonic)
    opened: bool = False

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.open), daemon=True)
        self.process.start()
        theirs.close()

    def next(self) -> None:
        self.since = time.monotonic()
        if self.pipe is not None:
            self.pipe.send(self.names[0] if self.names else None)

    def row(self) -> Row | None:
        """The next row of the process; None if the process has ended in the middle of a measurement."""
        assert self.pipe is not None
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return None

    def finish(self) -> None:
        """Let the process end without a signal."""
        self.next()
        self.process.join(ENDING)
        self.stop()

    def stop(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        self.process.kill()
        self.process.join()


def measured(
    jobs: Iterable[list[str]], open: Open, processes: int, limit: float, deadline: float
) -> Iterator[tuple[str, Row]]:
    """(name, row) of every name in ``jobs``, as finished. A worker measures the names of a job in sequence.

    Args:
        jobs: lists of names.
        open: called in each process; returns the measurements by name.
        processes: number of workers.
        limit: most seconds of a measurement.
        deadline: of ``time.monotonic``; afterwards running measurements are killed and waiting names are dropped.
    """
    waiting = deque(deque(job) for job in jobs if job)
    workers: list[Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                workers.append(Worker(open, waiting.popleft()))
                workers[-1].start()
            ready = set(wait([w.pipe for w in workers if w.pipe is not None], timeout=GLANCE))
            if time.monotonic() > deadline:
                return
            for worker in list(workers):
                late = time.monotonic() - worker.since > (limit if worker.opened else limit + STARTING)
                if worker.pipe not in ready and not late:
                    continue
                row = worker.row() if worker.pipe in ready else None
                if row is not None and not worker.opened:
                    worker.opened = True
                    worker.next()
                    continue
                yield worker.names.popleft(), row if row is not None else lost(worker, late, limit)
                broken = row is None or bool(row.pop("broken", False))
                if worker.names and not broken:
                    worker.next()
                    continue
                workers.remove(worker)
                worker.stop() if broken else worker.finish()
                waiting.extendleft([worker.names] if worker.names else [])
    finally:
        for worker in workers:
            worker.stop()


def lost(worker: Worker, late: bool, limit: float) -> Row:
    if late:
        return {"error": f"took longer than {limit:g} s"}
    worker.process.join(ENDING)
    return {"error": f"its process ended with code {worker.process.exitcode}"}


def work(pipe: Connection, open: Open) -> None:
    """The worker's loop: send a row for each received name, until the end of the pipe."""
    try:
        measures = open()
        pipe.send({})
        while (name := pipe.recv()) is not None:
            row = attempt(measures[name])
            broken = "error" in row and not device_answers()
            pipe.send(row | ({"broken": True} if broken else {}))
            if broken:
                return
    except EOFError:  # whoever asked is gone
        pass


def device_answers() -> bool:
    """Return False after an error that destroys the CUDA context."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").cpu()
    except Exception:  # noqa: BLE001 - whatever it is, nothing more will run here
        return False
    return True

"""Runs mutants in forked processes: ``python -m tests.fuzz.server --seeds DIR --first N --count M``.

torch is loaded once, before the first fork; no thread is started before it. A child runs mutants one after another and
says on a pipe which one it begins and what came of it. When it ends by a signal, or is silent for ``HANG`` seconds,
that is the mutant's failure and another child goes on after it. The last line on stdout is a summary in JSON.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from optkit.machine import target as targets
from tests.fuzz.contents import Contents, read_contents
from tests.fuzz.mutations import mutant
from tests.fuzz.seeds import write_seeds
from tests.fuzz.trial import Outcome, few_blocks, on_the_heap, trial
from tests.support.target import TARGET

HANG = 120  # seconds without a word
A_CHILD = 250  # mutants, so that what they leak stays small
MEMORY = 6 << 30  # bytes of address space that a mutant may ask for
TAIL = 6000  # characters of a report that are kept
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")


def run_all(seeds: Sequence[Contents], numbers: Sequence[int], folder: Path) -> Iterator[tuple[int, Outcome]]:
    """The outcome of each of ``numbers``, in order."""
    at = 0
    while at < len(numbers):
        for number, outcome in run_child(seeds, numbers[at : at + A_CHILD], folder):
            at += 1
            yield number, outcome


def run_child(
    seeds: Sequence[Contents], numbers: Sequence[int], folder: Path
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of as many of ``numbers`` as one process survives; the last is how it died, if it did."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile(dir=folder) as errors:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            child(seeds, numbers, folder, writing, errors.fileno())
        os.close(writing)
        begun, hung = 0, False
        for line in lines_of(reading):
            if line is None:
                hung = True
                break
            message = json.loads(line)
            if "begin" in message:
                begun = message["begin"]
            else:
                yield begun, Outcome(**message)
        os.close(reading)
        if hung:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        errors.seek(0)
        if status or hung:
            yield begun, death(status, hung, errors.read().decode(errors="replace"))


def lines_of(pipe: int) -> Iterator[bytes | None]:
    """The lines that come from ``pipe``; None, and no more, when nothing comes for too long."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], HANG)[0]:
            yield None
            return
        received = os.read(pipe, 1 << 16)
        if not received:
            return
        *whole, rest = (rest + received).split(b"\n")
        yield from whole


def child(seeds: Sequence[Contents], numbers: Sequence[int], folder: Path, pipe: int, errors: int) -> None:
    """Try the mutants; does not return."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    if not SANITIZED:  # a sanitizer reports signals itself, and its shadow memory is larger than any limit
        faulthandler.enable()
        limit = address_space() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.freeze()
    with os.fdopen(pipe, "w") as out:
        for number in numbers:
            say(out, {"begin": number})
            os.ftruncate(errors, 0)
            contents, _ = mutant(number, seeds)
            contents.write(folder / "mutant")
            say(out, asdict(trial(folder / "mutant")))
    os._exit(0)


def say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def death(status: int, hung: bool, report: str) -> Outcome:
    """How a child ended: a sanitizer's summary, the signal, or silence."""
    if hung:
        return Outcome("failed", f"hang: {innermost(report)}", report[-TAIL:])
    found = re.search(r"SUMMARY: (.*)|runtime error: (.*)", report)
    if found:
        kernel = re.search(r"in (?:void )?(optkit\S*).*?(\w+\.(?:cpp|h):\d+)", report)
        place = f" in {kernel[1]} {kernel[2]}" if kernel else ""
        return Outcome("failed", re.sub(r"0x[0-9a-f]+|\(BuildId.*", "", found[0]) + place, report[:TAIL])
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
    return Outcome("failed", f"{name}: {innermost(report)}", report[-TAIL:])


def innermost(report: str) -> str:
    """The function of optkit that faulthandler's traceback has first."""
    found = re.search(r'File "[^"]*/(?:ops|optkit)/([^"]*)", line \d+ in (\w+)', report)
    return f"{found[1]}:{found[2]}" if found else report.strip()[-100:]


def prepare(directory: Path) -> list[Contents]:
    """The seeds, after everything that a trial needs was loaded."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    on_the_heap()
    few_blocks()
    targets.detect = lambda refresh=False: TARGET  # type: ignore[assignment]
    return [read_contents(seed) for seed in write_seeds(directory)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.server")
    parser.add_argument("--seeds", type=Path, required=True, help="where the seeds are, or are made")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--only", type=int, help="one mutant, shown")
    return parser.parse_args()


def show(seeds: list[Contents], number: int, folder: Path) -> None:
    """One mutant, in a child: what it changed and what came of it."""
    tell("\n".join(mutant(number, seeds)[1]))
    ((_, outcome),) = run_all(seeds, [number], folder)
    tell(f"{outcome.kind}\n{outcome.cause}\n{outcome.detail}")


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    args = parse()
    args.seeds.mkdir(parents=True, exist_ok=True)
    seeds = prepare(args.seeds)
    with tempfile.TemporaryDirectory() as folder:
        if args.only is not None:
            show(seeds, args.only, Path(folder))
            return
        kinds: collections.Counter[str] = collections.Counter()
        failures = []
        for number, outcome in run_all(seeds, range(args.first, args.first + args.count), Path(folder)):
            kinds[outcome.kind] += 1
            if outcome.kind == "failed":
                changes = mutant(number, seeds)[1]
                failures.append({"number": number, "changes": changes, **asdict(outcome)})
                tell(json.dumps(failures[-1]))
        tell(json.dumps({"outcomes": kinds, "failures": len(failures)}))


if __name__ == "__main__":
    main()
